"""OpenAI's API over HTTP. Requests go to the same handler as the requests of the gRPC server."""
