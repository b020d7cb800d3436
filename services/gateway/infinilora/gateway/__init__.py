"""The gateway: OpenAI over HTTP in front, token ids over gRPC behind."""
