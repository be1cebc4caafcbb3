"""OpenVINO GenAI's ContinuousBatchingPipeline, weights in float16.

The model is exported beside its folder on first use.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import protocol


class OpenVino(protocol.Engine):
    """The pipeline in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = args.kv_gib
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 256
        scheduler.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": args.threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(args.model), scheduler, "CPU", properties)
        self.label = "OpenVINO GenAI fp16"
        self.versions = f"openvino-genai {openvino_genai.__version__}"

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        """See Engine."""
        configs = []
        for length in lengths:
            config = self._genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            configs.append(config)
        inputs = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        return [list(made.m_generation_ids[0]) for made in self._pipeline.generate(inputs, configs)]


def export(model: Path) -> Path:
    """Return the exported model, made now where it is missing. Raises CalledProcessError."""
    folder = model.with_name(f"{model.name}.openvino-fp16")
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [str(Path(sys.prefix) / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", str(unfinished)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        unfinished.rename(folder)
    return folder


if __name__ == "__main__":
    protocol.main(OpenVino, convert=export)
