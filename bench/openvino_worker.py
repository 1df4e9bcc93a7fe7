"""OpenVINO GenAI, asked through pipes: run by its own interpreter, which has `openvino_genai` and nothing of ours.

    PEER/bin/python -P bench/openvino_worker.py MODEL.gguf

Writes `{"ready": true}` once the model is loaded, then for each line `{"requests": [[token ids, output tokens], ...],
"one_by_one": bool}` of its input one line `{"duration_s": ..., "num_output_tokens": ...}`. Ends with its input.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]


def make_pipeline(weights: str) -> Any:
    """Paged and continuously batched, with as many seats as the other servers have."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    settings = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
    return openvino_genai.ContinuousBatchingPipeline(weights, scheduler, "CPU", settings)


def serve(pipeline: Any, requests: list[tuple[list[int], int]], *, one_by_one: bool) -> dict[str, float]:
    """Greedy, past the end of sequence. All requests are queued at once, or each when the one before is done."""
    handles = []  # kept to the end: a request whose handle is dropped is cancelled
    started = time.perf_counter()
    for number, (token_ids, num_output_tokens) in enumerate(requests):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_output_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
        handles.append(pipeline.add_request(number, prompt, config))
        if one_by_one:
            _finish(pipeline)
    _finish(pipeline)
    duration_s = time.perf_counter() - started
    num_output_tokens = sum(len(output.generated_ids) for handle in handles for output in handle.read_all())
    return {"duration_s": duration_s, "num_output_tokens": num_output_tokens}


def _finish(pipeline: Any) -> None:
    while pipeline.has_non_finished_requests():
        pipeline.step()


def main() -> None:
    # Whatever the library prints goes to the log, so that the pipe carries answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    pipeline = make_pipeline(sys.argv[1])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(serve(pipeline, asked["requests"], one_by_one=asked["one_by_one"])), file=answers)


if __name__ == "__main__":
    main()
