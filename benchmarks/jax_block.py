"""One Evoformer block of the official JAX code at the sizes of block.py: `block.py --jax PYTHON` runs this beside ours.

    python -m venv jax && jax/bin/pip install jax==0.10.2 dm-haiku ml_collections dm-tree absl-py chex immutabledict \
        biopython pandas scipy && jax/bin/pip install --no-deps alphafold-colabfold==2.3.12
    python benchmarks/block.py --only fp32,fast --jax jax/bin/python --rounds 3 --out benchmarks/results/NAME.json

It is ColabFold's copy of the official code, which pip installs; nothing of WarpFold or torch is imported.  Compiled by
XLA, in fp32, without dropout; sub-batches are those of the official inference (4), which has none where there are
gradients.
"""

import argparse
import json
import resource
import statistics
import time

import haiku as hk
import jax
import jax.numpy as jnp
from alphafold.model import config, modules, prng

C_M, C_Z = 256, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="128,256", help="sequences and residues")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--subbatch", type=int, help="rows at a time; all by default")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    sequences, residues = map(int, arguments.sizes.split(","))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = config.model_config("model_1").model
    whole.global_config.subbatch_size = arguments.subbatch
    whole.global_config.deterministic = True
    whole.global_config.use_remat = False

    def block(m: jax.Array, z: jax.Array) -> dict[str, jax.Array]:
        masks = {"msa": jnp.ones((sequences, residues)), "pair": jnp.ones((residues, residues))}
        layer = modules.EvoformerIteration(whole.embeddings_and_evoformer.evoformer, whole.global_config, False)
        return layer({"msa": m, "pair": z}, masks, is_training=False, safe_key=prng.SafeKey(jax.random.PRNGKey(0)))

    transformed = hk.transform(block)
    draw = lambda *shape: jax.random.normal(jax.random.PRNGKey(len(shape)), shape)  # noqa: E731
    m, z = draw(sequences, residues, C_M), draw(residues, residues, C_Z)
    parameters = transformed.init(jax.random.PRNGKey(0), m, z)
    leaves, tree = jax.tree_util.tree_flatten(parameters)  # those that begin as zeros are drawn: nothing is left out
    keys = jax.random.split(jax.random.PRNGKey(1), len(leaves))
    drawn = [x + 0.05 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)]
    parameters = jax.tree_util.tree_unflatten(tree, drawn)

    def loss(parameters: dict[str, jax.Array], m: jax.Array, z: jax.Array) -> jax.Array:
        out = transformed.apply(parameters, None, m, z)
        return jnp.mean(jnp.square(out["msa"])) + jnp.mean(jnp.square(out["pair"]))

    forward = jax.jit(lambda p, m, z: transformed.apply(p, None, m, z))
    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2))) if arguments.backward else forward
    seconds = []
    for _ in range(arguments.repeats + 1):  # the first one compiles
        start = time.perf_counter()
        jax.block_until_ready(run(parameters, m, z))
        seconds.append(time.perf_counter() - start)
    found = {
        "plan": {"jax": jax.__version__, "subbatch": arguments.subbatch},
        "pass": "forward and backward" if arguments.backward else "forward",
        "seconds": round(statistics.median(seconds[1:]), 3),
        "least": round(min(seconds[1:]), 3),
        "peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) // 1024,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
