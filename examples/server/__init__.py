"""The parts of the HTTP server `examples.serve`: the engine's thread, OpenAI's objects, chat templates, the routes."""
