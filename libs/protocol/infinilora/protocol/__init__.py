"""The words every process shares: ids, adapters, errors, control messages, subjects, keys, gRPC messages."""
