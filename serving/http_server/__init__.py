"""OpenAI's API over HTTP, on the request handler of the gRPC server."""
