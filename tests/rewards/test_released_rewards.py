"""Rewards from released files against their PyTorch references, from image and prompt to the
score.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from solrl_jax.errors import InputError
from solrl_jax.parallel import sharding
from solrl_jax.quant.half_precision import HalfPrecisionWeight
from solrl_jax.rewards import registry
from solrl_jax.rewards.clip import hpsv2
from solrl_jax.rewards.imagereward import imagereward
from solrl_jax.rewards.protocol import score_images
from tests import released
from tests.rewards.opening import open_reward

TOLERANCE = 1e-4
COUNT = len(released.PROMPTS)
NAMES = ("aesthetic", "clipscore", "hpsv2", "imagereward", "pickscore")
# The first is neither square nor a multiple: it is cropped or padded by halves of pixels.
SIZES = [(270, 340), pytest.param((256, 256), marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files of every reward in miniature: `reward.paths`, and by name the function that scores
    images as the reference does.
    """
    root = tmp_path_factory.mktemp("weights")

    def folder(name):
        return root / name

    for name in ("clip", "pick", "pick-tokenizer", "openai", "bert"):
        folder(name).mkdir()
    clip, clip_tokenizer = released.save_clip(folder("clip"), "quick_gelu", 1)
    pick, _ = released.save_clip(folder("pick"), "gelu", 2)
    for file in folder("pick").glob("tokenizer*"):  # that repository is read for its weights
        file.unlink()
    pick_tokenizer = released.save_clip_tokenizer(folder("pick-tokenizer"))
    released.save_openai_tokenizer(folder("openai"))
    hps = released.save_hps(root / "HPS_v2.1_compressed.safetensors", 3)
    bert = released.save_bert_tokenizer(folder("bert"))
    config, blip = released.save_image_reward(root / "ImageReward.safetensors", len(bert) + 2, 4)
    head = released.make_head(24, 7)
    save_file(
        {f"layers.{name}": t for name, t in head.state_dict().items()}, root / "head.safetensors"
    )

    @torch.no_grad()
    def aesthetic(images):
        vector = clip.get_image_features(released.processed(images)).pooler_output
        return head(vector / vector.norm(dim=-1, keepdim=True))[:, 0].double().numpy()

    paths = {
        "clipscore": folder("clip"),
        "pickscore": folder("pick"),
        "pickscore/tokenizer": folder("pick-tokenizer"),
        "hpsv2": root,
        "hpsv2/tokenizer": folder("openai"),
        "imagereward": root / "ImageReward.safetensors",
        "imagereward/tokenizer": folder("bert"),
        "aesthetic": root / "head.safetensors",
        "aesthetic/clip": folder("clip"),
    }
    references = {
        "clipscore": lambda images: (
            released.clip_logits(clip, clip_tokenizer, released.clipscore_pixels(images)) / 100
        ),
        "pickscore": lambda images: (
            released.clip_logits(pick, pick_tokenizer, released.processed(images)) / 26
        ),
        "hpsv2": lambda images: released.hps_scores(hps, images),
        "imagereward": lambda images: released.image_reward_scores(blip, bert, images),
        "aesthetic": aesthetic,
    }
    with pytest.MonkeyPatch.context() as patch:
        small_hps = registry.JaxEntry(partial(hpsv2, config=released.HPS))
        small_image_reward = registry.JaxEntry(partial(imagereward, config=config))
        patch.setitem(registry.REWARDS, "hpsv2", small_hps)
        patch.setitem(registry.REWARDS, "imagereward", small_image_reward)
        yield {name: str(path) for name, path in paths.items()}, references


@pytest.fixture(scope="module")
def everything(files):
    """All five in one."""
    return open_reward(dict.fromkeys(NAMES, 1.0), files[0]).load(None).trained


def score(reward, images, index, prompts=released.PROMPTS):
    out = score_images(
        reward, reward.params, jnp.asarray(images), reward.prepare(prompts), jnp.asarray(index)
    )
    return {name: np.asarray(value, np.float64) for name, value in jax.device_get(out).items()}


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def scored(request, everything):
    images = released.pictures(*request.param)
    return images, score(everything, images, np.arange(COUNT))


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_equals_its_reference(name, scored, files):
    images, ours = scored
    theirs = files[1][name](images)
    error = np.abs(ours[name] - theirs).max() / np.abs(theirs).max()
    print(
        f"{name}: {error:.1e} of {np.abs(theirs).max():.2f}, spread {np.ptp(theirs):.2f}", end=" "
    )
    assert error < TOLERANCE
    assert np.ptp(theirs) > 100 * TOLERANCE * np.abs(theirs).max()


def test_the_prompt_has_a_say_in_all_but_one(scored, everything):
    images, scores = scored
    other = score(everything, images, np.roll(np.arange(COUNT), 1))
    for name in NAMES:
        moved = np.abs(other[name] - scores[name]) / np.abs(scores[name]).max()
        assert (moved > 10 * TOLERANCE).sum() >= (0 if name == "aesthetic" else COUNT - 1), (
            name
        )  # one may be a coincidence
        assert (moved < 1e-6).all() == (name == "aesthetic"), name


def test_the_mixture_is_the_sum(scored):
    _, out = scored
    np.testing.assert_allclose(out["reward"], sum(out[name] for name in NAMES), rtol=1e-5)


@pytest.fixture(scope="module")
def many():
    """256 small pictures, each with a prompt."""
    return released.pictures(24, 30, 256), np.arange(256) % COUNT


@pytest.fixture(scope="module")
def at_once(many, everything):
    return score(everything, *many)


def same(name, ours, at_once):
    """Measured: no difference at all."""
    np.testing.assert_allclose(ours, at_once[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.exhaustive
def test_chunks_of_any_size_score_the_same(many, at_once, everything):
    images, index = many
    chunk = 10  # the last one is filled up, as `rl.generate` does it
    parts = [(images[i : i + chunk], index[i : i + chunk]) for i in range(0, 256, chunk)]
    scores = [score(everything, *(sharding.pad_rows(x, chunk) for x in part)) for part in parts]
    for name in NAMES:
        same(name, np.concatenate([s[name] for s in scores])[:256], at_once)


@pytest.mark.exhaustive
def test_on_a_mesh_rows_and_parameters_are_split_and_scores_stay(many, at_once, files):
    images, index = many
    mesh = sharding.make_mesh(4, 2)
    reward = open_reward(dict.fromkeys(NAMES, 1.0), files[0]).load(mesh).trained
    large = [x for x in jax.tree.leaves(reward.params) if x.size >= sharding.SMALLEST_SHARDED]
    assert large
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in large)

    def place(x):
        return jax.device_put(x, sharding.rows(mesh))

    with jax.set_mesh(mesh):
        prepared = jax.device_put(reward.prepare(released.PROMPTS), sharding.replicated(mesh))
        out = score_images(reward, reward.params, place(images), prepared, place(index))
    for name in NAMES:
        assert out[name].sharding.shard_shape((256,)) == (32,)
        same(name, np.asarray(out[name]), at_once)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(jnp.float16, 0.9995), pytest.param(jnp.bfloat16, 0.995, marks=pytest.mark.exhaustive)],
)
@pytest.mark.exhaustive
def test_products_in_sixteen_bits_score_and_rank_almost_as_float32(
    dtype, least, many, at_once, files
):
    """FP16 has three bits more than BF16. docs/kernels.md has the errors at the released sizes."""
    reward = open_reward(dict.fromkeys(NAMES, 1.0), files[0], dtype).load(None).trained
    leaves = jax.tree.leaves(reward.params, is_leaf=lambda x: isinstance(x, HalfPrecisionWeight))
    assert {leaf.weight.dtype for leaf in leaves if isinstance(leaf, HalfPrecisionWeight)} == {
        jnp.dtype(dtype)
    }
    assert {leaf.dtype for leaf in leaves if not isinstance(leaf, HalfPrecisionWeight)} == {
        jnp.dtype(jnp.float32)
    }
    assert (
        sum(isinstance(leaf, HalfPrecisionWeight) for leaf in leaves) == 3 * 12 + 6 + 4 + 10
    )  # of three CLIPs, a vision tower, BLIP
    scores = score(reward, *many)
    for name in NAMES:
        of_prompts = [
            (scores[name][many[1] == i], at_once[name][many[1] == i]) for i in range(COUNT)
        ]
        assert min(stats.spearmanr(*pair).statistic for pair in of_prompts) > least, name
        assert not np.array_equal(scores[name], at_once[name])


# --- what is missing or does not fit ---


def refusal(name, paths):
    with pytest.raises(InputError) as error:
        open_reward({name: 1.0}, paths)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_file_is_one_message(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("hpsv2", {})
    for part in (
        "reward 'hpsv2': weights/HPS_v2.1_compressed.safetensors: no such file",
        "https://huggingface.co/xswu/HPSv2",
        "download HPS_v2.1_compressed.pt",
        "convert it to weights/HPS_v2.1_compressed.safetensors",
        "reward.paths.hpsv2=",
    ):
        assert part in message
    assert f"{tmp_path}/ImageReward.safetensors: no such file" in refusal(
        "imagereward", {"imagereward": str(tmp_path)}
    )
    (tmp_path / "ImageReward.pt").write_bytes(b"pickle")
    assert "ImageReward.pt: not a .safetensors file" in refusal(
        "imagereward", {"imagereward": "ImageReward.pt"}
    )
    assert "sac+logos+ava1-l14-linearMSE.pth" in refusal("aesthetic", {})


def test_what_the_hub_does_not_give_is_one_message(files, tmp_path):
    message = refusal("pickscore", {})
    assert (
        "reward 'pickscore': yuvalkirstain/PickScore_v1: config.json, model.safetensors cannot be "
        "downloaded from the Hub" in message
    )
    assert "reward.paths.pickscore=DIRECTORY" in message
    assert "pickscore/tokenizer" in refusal("pickscore", {"pickscore": files[0]["pickscore"]})
    assert "no tokenizer_config.json, tokenizer.json" in refusal(
        "clipscore", {"clipscore": files[0]["pickscore"]}
    )
    assert "no such directory" in refusal("clipscore", {"clipscore": "./nowhere"})


def test_the_file_is_found_in_weights_where_no_path_is_given(files, tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "ImageReward.safetensors").symlink_to(files[0]["imagereward"])
    monkeypatch.chdir(tmp_path)
    open_reward({"imagereward": 1.0}, {"imagereward/tokenizer": files[0]["imagereward/tokenizer"]})


@pytest.mark.parametrize("name", ["hpsv2", "imagereward"])
def test_tensors_that_do_not_fit_are_all_listed(name, files, tmp_path):
    paths = files[0]
    file = {
        "hpsv2": f"{paths['hpsv2']}/HPS_v2.1_compressed.safetensors",
        "imagereward": paths["imagereward"],
    }[name]
    tensors = load_file(file)
    missing_key, misshapen = {
        "hpsv2": ("visual.transformer.resblocks.1.attn.in_proj_weight", "text_projection"),
        "imagereward": (
            "blip.text_encoder.encoder.layer.1.crossattention.self.key.weight",
            "blip.visual_encoder.pos_embed",
        ),
    }[name]
    del tensors[missing_key]
    tensors |= {misshapen: tensors[misshapen][:, :-1].contiguous(), "extra.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "other.safetensors")
    message = refusal(name, paths | {name: str(tmp_path / "other.safetensors")})
    assert "3 tensor(s) do not fit" in message
    for part in (
        f"missing {missing_key}",
        f"{misshapen} has shape",
        "unexpected extra.weight (2,)",
    ):
        assert part in message


def test_unknown_names_of_paths_are_refused():
    with pytest.raises(
        InputError, match=r"reward.paths: unknown name 'hps'; available: clipscore, pickscore, "
    ):
        open_reward({"shapes": 1.0}, {"hps": "x"})
    with pytest.raises(InputError, match=r"unknown score 'hpsv2/strict'; available: hpsv2"):
        open_reward({"hpsv2/strict": 1.0}, {})
