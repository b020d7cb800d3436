"""The only room that knows NATS, Redis, S3, gRPC and OpenTelemetry."""
