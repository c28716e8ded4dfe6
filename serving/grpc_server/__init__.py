"""gRPC server of an `LLM`. Its services are amoeba.v1, the Open Inference Protocol, health and reflection."""
