"""The parts of the HTTP server `examples.serve`.

- app.py         the routes; responses.py: how bodies are read and answers sent
- api.py         reads OpenAI's requests; fields.py: single fields of them, and OpenAI's errors
- grammar.py     which texts an answer may be; tools.py: calls of tools in it
- answers.py     makes OpenAI's answers; logprobs.py, tokens.py: the log-probabilities and texts of tokens
- chat.py        chat templates
- worker.py      the engine's thread
- middleware.py  who may call, request ids, the access log
- metrics.py     the numbers at /metrics
- http.py        uvicorn, signals, the socket
- options.py     the command line; memory.py: how much memory there is
- processes.py   starts a process for each GPU
"""
