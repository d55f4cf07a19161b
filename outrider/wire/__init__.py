"""The only place where protobuf messages and gRPC statuses meet the project's own values."""
