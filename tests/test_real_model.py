"""A real model from a package, made into a folder: what it goes on with, and a chat through the server."""

import json
import urllib.request

import pytest

from examples import real_model
from tests.http_server import Running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    try:
        path = real_model.find_gguf()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("smollm2")
    real_model.make_folder(path, folder)
    return folder


def test_it_knows_a_capital(smollm2):
    assert real_model.go_on(smollm2, "The capital of France is", 2).startswith(" Paris")


def test_a_chat_through_the_server(smollm2):
    server = Running("--model", str(smollm2), "--served-model-name=smollm2", "--max-model-len=256")
    try:
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
            "max_tokens": 24,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            [choice] = json.load(response)["choices"]
    finally:
        server.stop()
    assert "Paris" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"  # the model ended its turn itself
