"""Time the noise of a step of the MLP: 795,010 normals, by wall and by CPU time.

python benchmarks/noise_time.py
python benchmarks/noise_time.py --instructions avx2
"""

from statistics import median

import torch
from common import INSTRUCTIONS, Step, force, in_turn, machine, parser_of

from dpmac_cli.dp.clipping.layers import blocks
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.training.memory import keep_freed_memory

SIZE, ROUNDS = 795_010, 200


def main() -> None:
    """Print the least and the median time of every way to draw."""
    parser = parser_of(__doc__)
    parser.add_argument("--instructions", choices=INSTRUCTIONS, default="default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    force(options.instructions)
    keep_freed_memory()
    print(machine())
    counts = [part.stop - part.start for part in blocks(SIZE, torch.device("cpu"))]
    key, numbers = make_keys(0).noise, iter(range(1, 10**9))
    single, double = (
        [torch.empty(n, dtype=d) for n in counts] for d in (torch.float32, torch.float64)
    )

    def drawn(likes: list[torch.Tensor], secure: bool = False) -> None:
        source = Noise(key, secure=secure).at(next(numbers))
        for like in likes:
            source.standard_normal(like)

    ways: dict[str, Step] = {
        "float32": lambda: drawn(single),
        "float64": lambda: drawn(double),
        "secure": lambda: drawn(double, secure=True),
        "torch.normal_": lambda: [like.normal_() for like in single],
    }
    for threads in dict.fromkeys((1, torch.get_num_threads())):
        torch.set_num_threads(threads)
        for name, taken in in_turn(ways, dict.fromkeys(ways, 1), options.rounds).items():
            walls, cpus = [each.wall for each in taken], [each.cpu for each in taken]
            print(
                f"{threads} threads, {name}: {median(walls):.2f} ms, least {min(walls):.2f}, "
                f"CPU {median(cpus):.2f}, least {min(cpus):.2f}"
            )


if __name__ == "__main__":
    main()
