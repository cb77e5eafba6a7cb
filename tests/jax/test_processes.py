"""attnmask.jax where it has to run in a process of its own: on several devices, in several threads and processes, for a
time that has a limit.
"""

import socket
import textwrap

import pytest
from jax_processes import finish, run, start

pytest.importorskip("jax")


@pytest.mark.long
def test_jax_takes_the_handlers_once_it_has_started():
    """To import the module starts nothing; the first traced call does."""
    out = run(
        """
        from jax._src import xla_bridge
        print(xla_bridge.backends_are_initialized())
        x = jnp.ones((1, 4, 1, 8))
        print(jax.jit(attnmask.jax.flash_attention)(x, x, x).sum())
        """
    )
    assert out == ["False", "32.0"]


def test_threads_with_large_arrays():
    """1,000 compiled training steps, half in each of two threads; the callback of JAX stops after a few."""
    out = run(
        """
        import threading
        x = jnp.asarray(rng.standard_normal((2, 1024, 4, 32)), np.float32)  # a MB each

        @jax.jit
        def step(x, offset):
            loss = lambda x: (attnmask.jax.flash_attention(
                x, x, x, causal=True, sliding_window=(16, 0), causal_offset=offset) ** 2).sum()
            return x - 1e-9 * jax.grad(loss)(x)

        right = np.asarray(step(x, jnp.zeros(2, np.int32)))
        wrong = []

        def train():
            y = x
            for i in range(500):
                y = step(y, jnp.zeros(2, np.int32))
                if i == 0 and not np.array_equal(y, right):
                    wrong.append(i)
            jax.block_until_ready(y)

        threads = [threading.Thread(target=train) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(wrong)
        """
    )
    assert out == ["[]"]


def test_more_devices_than_threads():
    """Where callbacks hang: every thread waits for an array that another one is to bring."""
    out = run(
        """
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        x = rng.standard_normal((4, 700, 8, 64)).astype(np.float32)
        attend = jax.jit(jax.shard_map(lambda x: attnmask.jax.flash_attention(x, x, x, causal=True),
                                       mesh=mesh, in_specs=P("d"), out_specs=P("d")))
        results = [attend(x) for _ in range(10)]
        right = attnmask.flash_attention(x, x, x, causal=True)
        print(all(np.array_equal(result, right) for result in results))
        """,
        devices=4,
    )
    assert out == ["True"]


def test_gradients_under_shard_map():
    """With the checks that JAX makes by default; what all devices share gets the sum of their gradients."""
    out = run(
        """
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        x = rng.standard_normal((4, 70, 8, 16)).astype(np.float32)
        ids = np.sort(rng.integers(0, 3, (4, 70))).astype(np.int32)
        bias = rng.standard_normal((8, 70, 70)).astype(np.float32)
        sinks = rng.standard_normal(2).astype(np.float32)

        def loss(q, k, v, bias, sinks, ids):
            out, lse = attnmask.jax.flash_attention(
                q, k, v, bias=bias, softmax_aux=sinks, causal=True, q_segment_ids=ids, return_lse=True)
            return jax.lax.psum((out**2).sum() + lse.sum(), "d")

        def grads(*specs):
            mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
            return jax.jit(jax.grad(mapped, argnums=range(5)))

        out, vjp = attnmask.flash_attention_vjp(x, x, x, bias=bias, softmax_aux=sinks, causal=True, q_segment_ids=ids,
                                                return_lse=True, grad_bias=True, grad_softmax_aux=True)
        right = vjp(2 * out[0], np.ones_like(out[1]))
        got = grads(P("d"), P("d"), P("d"), P(), P(), P("d"))(x, x, x, bias, sinks, ids)
        print(all(np.array_equal(*pair) for pair in list(zip(got, right))[:3]))
        print(all(np.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(got, right)))

        k, ids = np.broadcast_to(x[:1], x.shape), np.broadcast_to(ids[:1], ids.shape)  # the same on all devices
        out, vjp = attnmask.flash_attention_vjp(x, k, k, bias=bias, softmax_aux=sinks, causal=True, q_segment_ids=ids,
                                                return_lse=True, grad_bias=True, grad_softmax_aux=True)
        right = vjp(2 * out[0], np.ones_like(out[1]))
        right = [right.query, right.key.sum(0)[None], right.value.sum(0)[None], right.bias, right.softmax_aux]
        got = grads(P("d"), P(), P(), P(), P(), P())(x, x[:1], x[:1], bias, sinks, ids[:1])
        print(all(np.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(got, right)))
        """,
        devices=4,
    )
    assert out == ["True"] * 3


def test_heads_under_shard_map_and_scan():
    """Heads over devices, layers in a loop, gradients by recomputing."""
    out = run(
        """
        mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
        x = rng.standard_normal((2, 70, 4, 16)).astype(np.float32)
        specs = P("b", None, "h")

        @jax.checkpoint
        def layer(x, _):
            return x + attnmask.jax.flash_attention(x, x, x, causal=True), None

        def loss(x):
            return (jax.lax.scan(layer, x, None, length=3)[0] ** 2).sum()

        def local(x):
            return jax.lax.psum(loss(x), ("b", "h"))

        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        print(np.array_equal(jax.jit(jax.grad(mapped))(x), jax.jit(jax.grad(loss))(x)))
        """,
        devices=4,
    )
    assert out == ["True"]


def test_sharded_arrays_without_shard_map():
    out = run(
        """
        x = rng.standard_normal((4, 70, 8, 16)).astype(np.float32)
        right = attnmask.flash_attention(x, x, x, causal=True)
        attend = lambda x: attnmask.jax.flash_attention(x, x, x, causal=True)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
            sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
            print(np.array_equal(jax.jit(attend)(sharded), right), np.array_equal(attend(sharded), right))
            print(jax.jit(jax.grad(lambda x: attend(x).sum()))(sharded).shape)
        """,
        devices=4,
    )
    assert "".join(out) == ("TrueTrue(4,70,8,16)") * 2


def test_two_processes():
    """A mesh over both; each has the calls of its own devices."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    code = """
    jax.distributed.initialize("127.0.0.1:{port}", 2, {rank}, initialization_timeout=60)
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    x = rng.standard_normal((4, 70, 8, 16)).astype(np.float32)
    sharding = NamedSharding(mesh, P("d"))
    whole = jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def loss(x):
        return jax.lax.psum((attnmask.jax.flash_attention(x, x, x, causal=True) ** 2).sum(), "d")

    step = jax.jit(jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=P())))
    out, vjp = attnmask.flash_attention_vjp(x, x, x, causal=True)
    right = sum(vjp(2 * out)[:3])
    for _ in range(20):
        grads = step(whole)
    print(all(np.allclose(shard.data, right[shard.index], rtol=1e-4, atol=1e-4) for shard in grads.addressable_shards))
    print(len(grads.addressable_shards))
    jax.distributed.shutdown()
    """
    both = [
        start(
            textwrap.dedent(code.format(port=port, rank=rank)), 2, JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo"
        )
        for rank in range(2)
    ]
    assert [finish(process) for process in both] == [["True", "2"]] * 2


def test_export(tmp_path):
    """A program that is loaded in another process calls what `register` gives to JAX there."""
    pytest.importorskip("flatbuffers")
    path = str(tmp_path / "program")
    code = f"""
    path = {path!r}
    x = jnp.asarray(rng.standard_normal((1, 70, 8, 16)), np.float32)
    """
    out = run(
        textwrap.dedent(code)
        + textwrap.dedent(
            """
            grad = jax.jit(jax.grad(lambda x: attnmask.jax.flash_attention(x, x, x, causal=True).sum()))
            try:
                jax.export.export(grad)(x)
            except ValueError as error:
                print("attnmask_flash_forward" in str(error))
            checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in attnmask.jax.register()]
            data = jax.export.export(grad, disabled_checks=checks)(x).serialize()
            open(path, "wb").write(data)
            """
        )
    )
    assert out == ["True"]
    out = run(
        textwrap.dedent(code)
        + textwrap.dedent(
            """
            attnmask.jax.register()
            out, vjp = attnmask.flash_attention_vjp(x, x, x, causal=True)
            got = jax.export.deserialize(open(path, "rb").read()).call(x)
            print(np.allclose(got, sum(vjp(np.ones_like(out))[:3]), rtol=1e-4, atol=1e-4))
            """
        )
    )
    assert out == ["True"]
