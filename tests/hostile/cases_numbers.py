"""Numbers that no machine can hold: refused before anything is loaded or compiled."""

from tests.hostile.harness import Case

BIG = 10**9
FIELDS = (
    "rollout.candidates",
    "rollout.num_steps",
    "rollout.explore.num_steps",
    "rollout.explore.correction_rank",
    "model.max_sequence_length",
    "model.height",
    "model.width",
    "lora.rank",
    "eval.num_steps",
    "eval.num_images_per_prompt",
    "eval.num_prompts",
    "eval.num_grid_images",
    "train.num_prompts",
    "reward.workers",
    "run.keep_checkpoints",
    "optimizer.steps_per_iteration",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.data",
    "model.vae_tile_size",
)
TOGETHER = {
    "rollout.explore.num_steps": " rollout.num_steps=1000000000",
    "model.height": "",
    "rollout.candidates": "",
}
SAMPLE = "sample embedded:tiny-sana --prompts embedded:shapes-test --out {dir}/out"
CASES = [
    *(
        Case(
            f"{field} is 10^9",
            f"train tiny run.dir={{dir}}/run {field}={BIG}{TOGETHER.get(field, '')}",
            field,
        )
        for field in FIELDS
        if field not in ("run.keep_checkpoints",)
    ),
    *(
        Case(f"{field} is 10^6", f"train tiny run.dir={{dir}}/run {field}={10**6}", field)
        for field in (
            "rollout.candidates",
            "rollout.num_steps",
            "model.max_sequence_length",
            "lora.rank",
            "eval.num_images_per_prompt",
            "eval.num_steps",
        )
    ),
    *(
        Case(f"{field} is 10^30", f"train tiny run.dir={{dir}}/run {field}={10**30}", field)
        for field in (
            *FIELDS,
            "train.iterations",
            "optimizer.per_device_batch_size",
            "rollout.per_device_batch_size",
            "eval.every",
            "run.checkpoint_every",
        )
    ),
    Case(
        "height and width are 10^5",
        "train tiny run.dir={dir}/run model.height=100000 model.width=100000",
        "model.height",
    ),
    Case(
        "evaluation at 16384 px",
        "train tiny run.dir={dir}/run eval.size=[16384,16384]",
        "eval.num_images_per_prompt=10",
    ),
    Case(
        "training at 16384 px",
        "train tiny run.dir={dir}/run rollout.size=[[32,32],[16384,16384]]",
        "rollout.candidates=48",
    ),
    Case("sample: 10^9 steps", SAMPLE + f" --steps {BIG}", "--steps"),
    Case("sample: 10^9 tokens", SAMPLE + f" --max-tokens {BIG}", "--max-tokens"),
    Case("sample: 10^6 tokens", SAMPLE + " --max-tokens 1000000", "--max-tokens"),
    Case("sample: 10^9 pixels a side", SAMPLE + f" --size {BIG}x{BIG}", "--size"),
    Case("sample: 10^5 pixels a side", SAMPLE + " --size 102400x102400", "--size"),
    Case("sample: a seed of 10^30", SAMPLE + f" --seed {10**30}", "--seed"),
    Case(
        "rank: 10^9 candidates", f"rank tiny --candidates {BIG} --out {{dir}}/out", "--candidates"
    ),
    Case("rank: 10^9 steps", f"rank tiny --steps {BIG} --out {{dir}}/out", "--steps"),
    Case("rank: 10^9 prompts", f"rank tiny --prompts {BIG} --out {{dir}}/out", "--prompts"),
    Case("plan: 10^9 devices", f"plan tiny --devices {BIG}", "--devices"),
    Case("plan: 10^9 hosts", f"plan tiny --hosts {BIG}", "--hosts"),
    Case(
        "a profile of iteration 10^9",
        f"train tiny run.dir={{dir}}/run --profile {BIG}",
        "--profile",
    ),
]
