"""The OpenAPI document says what the API does, and the API does what the document says."""

import os
import subprocess
import sys
from pathlib import Path

from pagedd.daemon.api_keys import hash_line
from pagedd.daemon.http_routes import ROUTES
from pagedd.daemon.openai_schema import ChatBody, CompletionBody, TokenizeBody
from pagedd.daemon.openapi import openapi_document

from .conftest import StartDaemon

KEY = "0123456789abcdef01234567"


def test_every_route_and_every_field_is_in_it() -> None:
    document = openapi_document()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert [operation["operationId"] for operation in operations] == [route.handler for route in ROUTES]
    schemas = document["components"]["schemas"]
    for body in (CompletionBody, ChatBody, TokenizeBody):
        assert list(schemas[body.__name__]["properties"]) == list(body.__struct_fields__)


def test_a_field_has_the_range_that_is_checked() -> None:
    schemas = openapi_document()["components"]["schemas"]
    fields = schemas["ChatBody"]["properties"]
    assert fields["top_p"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert fields["max_completion_tokens"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
    assert fields["stop"]["anyOf"][0] == {"type": "string", "minLength": 1, "maxLength": 256}
    assert fields["logprobs"]["anyOf"] == [{"type": "boolean"}, {"type": "null"}]
    assert fields["tools"]["enum"] == [None, []]
    assert schemas["Turn"]["properties"]["role"] == {
        "type": "string",
        "minLength": 1,
        "maxLength": 64,
        "description": "As the model's chat template knows it.",
    }


def test_whatever_is_sent_is_answered_as_the_document_says(
    start_daemon: StartDaemon, free_port: int, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(hash_line(KEY, "tester"))
    daemon = start_daemon(
        *("--http-port", str(free_port), "--api-key-file", str(keys)),
        *("--max-prompts-per-request", "2", "--max-model-len", "64"),
        fake_engine=True,
        environ={"FAKE_ENGINE_LOAD": "ok"},
    ).wait_ready()
    url = f"http://127.0.0.1:{free_port}"
    # Of what is valid by its form, much is refused all the same: prompts that are too long, ids that the model lacks.
    run = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"),
            *("--header", f"Authorization: Bearer {KEY}", "--exclude-checks", "positive_data_acceptance"),
            *("--max-examples", "20", "--generation-deterministic", "--phases", "coverage,fuzzing"),
            *("--request-timeout", "20", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert daemon.get("/ready")[0] == 200
