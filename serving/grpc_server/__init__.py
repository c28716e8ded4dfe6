"""gRPC server of an `LLM`, with the services amoeba.v1, the Open Inference Protocol, health and reflection."""
