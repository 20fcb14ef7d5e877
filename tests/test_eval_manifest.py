"""What a manifest says, that its check of the cache can fail, and models split over devices."""

import json

import pytest
import torch
from test_eval_results import build, characters, open_results
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hf_posenc
from eval import models
from eval.likelihood import token_losses
from eval.manifest import check_cache, write_manifest


@pytest.mark.parametrize("posenc", ["none", "yarn:factor=4", "dynamic_ntk", "self_extend:group_size=4,window=16"])
def test_sound_encodings_agree_beyond_the_trained_length(posenc):
    model = build()
    with models.applied(model, posenc):
        found = check_cache(model, 150)
    assert found["agrees"] and found["same_tokens"] == found["new_tokens"] == 8 and found["largest_difference"] < 1e-5


def test_transformers_own_dynamic_scaling_does_not():
    config = build().config
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    assert check_cache(model, 40)["agrees"]
    found = check_cache(model, 150)
    assert not found["agrees"] and found["largest_difference"] > 1e-2


def test_the_manifest_names_what_was_measured(tmp_path):
    model, tokenizer = build(), characters()
    results = open_results(tmp_path, weights=models.fingerprint(model), seed=3)
    results.add({"posenc": "none", "index": 0, "length": 100, "truncated": 0})
    results.complete()
    write_manifest(results, model, tokenizer, ["none", "yarn:factor=4"], length=100, check=64)
    content = json.loads((results.folder / "manifest.json").read_text())
    assert content["weights"] == models.fingerprint(model) and content["seed"] == 3 and content["trained_length"] == 64
    assert (content["samples"], content["truncated"], content["processes"]) == (1, 0, 1)
    assert content["versions"]["torch"] == torch.__version__ and content["versions"]["hf-posenc"]
    none, yarn = content["encodings"]
    assert none["method"] is None and "factor=4" in yarn["method"] and yarn["max_position_embeddings"] == 256
    assert none["cache"]["agrees"] and yarn["cache"]["prompt_tokens"] == 64
    assert hf_posenc.current(model) is None


def test_a_model_partly_on_disk_is_evaluated_as_in_memory(tmp_path):
    whole = build()
    whole.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
              "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert any(parameter.is_meta for parameter in split.parameters())
    assert models.input_device(split).type == "cpu"
    assert models.fingerprint(split) == models.fingerprint(whole)
    ids = torch.arange(150)[None]
    for posenc in ("none", "yarn:factor=4", "rerope:window=16"):
        with models.applied(whole, posenc), models.applied(split, posenc):
            assert torch.allclose(token_losses(split, ids), token_losses(whole, ids), atol=1e-5)


def test_split_loads_one_model_over_all_devices(tmp_path, monkeypatch):
    build().save_pretrained(tmp_path)
    characters().save_pretrained(tmp_path)
    asked, original = [], hf_posenc.from_pretrained

    def loaded(path, **options):
        asked.append(options.get("device_map"))
        return original(path, **options)

    monkeypatch.setattr(hf_posenc, "from_pretrained", loaded)
    model, _ = models.load(str(tmp_path), "float32", "split")
    with models.applied(model, "yarn:factor=4"):
        assert check_cache(model, 100)["agrees"]
    assert asked == ["auto"]
    monkeypatch.setattr(models.processes, "count", lambda: 2)
    with pytest.raises(ValueError, match="several processes"):
        models.load(str(tmp_path), "float32", "split")
