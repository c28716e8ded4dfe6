"""The gRPC server: an `LLM` behind amoeba.v1, the Open Inference Protocol, health and reflection."""
