"""OpenAI's HTTP API in front of the relay, in the process and on the event loop of the gRPC front."""
