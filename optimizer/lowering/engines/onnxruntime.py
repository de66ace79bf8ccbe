"""ONNX Runtime, by way of torch's own exporter to ONNX."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import fx

from optimizer.lowering.engines.compiled import Run


class OnnxRuntime:
    """Takes 3 to 15 seconds to prepare, nearly all of it in the exporter.

    Source: https://onnxruntime.ai/docs/api/python, `InferenceSession`.
    """

    name, title, module = "onnxruntime", "ONNX Runtime", "onnxruntime"

    def compile(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], threads: int) -> Run:
        """A program on so many threads, which do not spin between calls."""
        import onnxruntime

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            exported = torch.onnx.export(graph, tuple(inputs), dynamo=True, verbose=False)
        assert exported is not None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(
            exported.model_proto.SerializeToString(), options, ["CPUExecutionProvider"]
        )
        names = [each.name for each in session.get_inputs()]

        def run(given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            arrays = {name: each.numpy() for name, each in zip(names, given, strict=True)}
            return list(map(torch.from_numpy, session.run(None, arrays)))

        return run
