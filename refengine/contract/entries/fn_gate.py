"""fn_attn_gate, elementwise. Spec flash-next."""

from __future__ import annotations

from refengine.contract.entries.activations import AttentionGate, GateCase, gate_buffers, gates_of
from refengine.contract.entry import Bounds, Inputs, Modules, contract
from refengine.contract.workbench import Workbench
from refengine.verify import oracles

GATE = "kernels_numba.flash_next.gate"


@contract
class FlashNextGate(AttentionGate):
    """out = bf16(o / (1 + E(-gate))). Queries and the columns after the gates are poison."""

    name = "fn_attn_gate"
    kernels = ("fn_attn_gate_kernel",)
    modules = (GATE,)

    def launch(self, case: GateCase, inputs: Inputs, bench: Workbench, modules: Modules) -> None:
        out, o = gate_buffers(case, inputs, bench)
        modules[GATE].fn_attn_gate(out, o, bench.input("qkv", inputs["qkv"]), case.D)

    def exact(self, case: GateCase, inputs: Inputs) -> Bounds:
        return {"out": oracles.divided_gate(inputs["o"], gates_of(inputs["qkv"], case).reshape(case.rows, -1))}
