"""The gRPC front door: an `LLM` behind amoeba.v1, the Open Inference Protocol, health and reflection."""
