"""Numbers that no machine can hold: refused before anything is loaded or compiled.

One case per way of refusing them.
"""

from tests.hostile.harness import Case

BIG = 10**9
TRAIN = "train tiny run.dir={dir}/run"
GENERATE = "generate embedded:tiny-sana --prompts embedded:shapes-test --out {dir}/out"
FIELDS = (
    "rollout.candidates",  # too much memory
    "rollout.num_steps",  # a range
    "eval.num_images_per_prompt",  # too much memory on the host
    "eval.num_grid_images",  # a range
    "optimizer.steps_per_iteration",  # does not divide the terms
    "mesh.tensor",  # more than the devices
)
CASES = [
    *(Case(f"{field} is 10^9", f"{TRAIN} {field}={BIG}", field) for field in FIELDS),
    Case("train.iterations is 10^30", f"{TRAIN} train.iterations={10**30}", "train.iterations"),
    Case(
        "height and width are 10^5",
        f"{TRAIN} model.height=100000 model.width=100000",
        "model.height",
    ),
    Case(
        "evaluation at 16384 px",
        f"{TRAIN} eval.size=[16384,16384]",
        "eval.num_images_per_prompt=10",
    ),
    Case(
        "training at 16384 px",
        f"{TRAIN} rollout.size=[[32,32],[16384,16384]]",
        "rollout.candidates=48",
    ),
    Case("generate: 10^9 steps", f"{GENERATE} --num-steps {BIG}", "--num-steps"),
    Case(
        "generate: 10^6 tokens",
        f"{GENERATE} --max-sequence-length 1000000",
        "--max-sequence-length",
    ),
    Case("generate: 10^5 pixels a side", f"{GENERATE} --size 102400x102400", "--size"),
    Case("rank: 10^9 steps", f"rank tiny --steps {BIG} --out {{dir}}/out", "--steps"),
    Case("rank: 10^9 prompts", f"rank tiny --prompts {BIG} --out {{dir}}/out", "--prompts"),
    Case("plan: 10^9 devices", f"plan tiny --devices {BIG}", "--devices"),
    Case("profile of iteration 10^9", f"{TRAIN} --profile {BIG}", "--profile"),
]
