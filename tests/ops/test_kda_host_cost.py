"""What a KDA training call asks of the host in Python, with the two CUDA ops replaced by stand-ins.

Why it matters: at a TP share of few heads the kernels take a few hundred microseconds; a slow wrapper would leave the card idle.
Not covered: the C++ side of the ops (tools/bench_ops.py measures whole calls on a card).
"""

from __future__ import annotations

import torch

from megamoe.ops.kda_chunk import cuda

def test_a_call_dispatches_one_op_a_direction_and_copies_nothing(monkeypatch):
    """Counted rather than timed, so that a busy machine changes nothing: every torch operation of a training call."""
    T, H = 8, 2
    calls = []

    def fwd(q, k, v, g, beta, A_log, dt_bias, h0, cu, lower_bound, scale, output_final_state):
        calls.append("fwd")
        assert dt_bias.data_ptr() % 16 == 0
        return torch.empty_like(v), torch.empty(0)

    def bwd(d_o, d_final, q, k, v, g, beta, A_log, dt_bias, h0, cu, lower_bound, scale):
        calls.append("bwd")
        return tuple(x if x is None else torch.empty_like(x) for x in (q, k, v, g, beta, A_log, dt_bias, h0))

    class Ops:
        kda_chunk_fwd, kda_chunk_bwd = staticmethod(fwd), staticmethod(bwd)

    monkeypatch.setattr(torch.ops, "megamoe", Ops)
    inputs = [torch.randn(T, H, 128).bfloat16().requires_grad_() for _ in range(4)] + [torch.randn(T, H).requires_grad_()]
    options = dict(A_log_H=torch.zeros(H, requires_grad=True), dt_bias_HK=torch.zeros(H, 128, requires_grad=True))
    seen = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Count():
        o, _ = cuda.kda_chunk(*inputs, **options)
        o.backward(torch.ones_like(o))
    assert calls == ["fwd", "bwd"]
    # The stand-ins' own allocations, one view that autograd makes of each output, and a detach for each gradient kept.
    assert not [name for name in seen if any(word in name for word in ("copy", "clone", "_to", "contiguous", "zeros"))], seen


def test_a_parameter_off_the_vector_boundary_is_copied_to_one():
    """The kernels read dt_bias 16 bytes at a time; an optimizer's flat buffer puts it anywhere."""
    flat = torch.arange(257.0)
    assert torch.equal(cuda._vectors(flat[1:]), flat[1:]) and cuda._vectors(flat[1:]).data_ptr() % 16 == 0
    assert cuda._vectors(flat[4:]).data_ptr() == flat[4:].data_ptr()
