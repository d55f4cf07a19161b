"""Heads that are known to belong to a target: what `--heads auto` takes."""

from pathlib import Path

PUBLISHED_HEADS = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
    "lmsys/vicuna-13b-v1.3": "yuhuili/EAGLE3-Vicuna1.3-13B",
    "meta-llama/Llama-3.1-8B-Instruct": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "meta-llama/Llama-3.3-70B-Instruct": "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    "meta-llama/Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "Qwen/Qwen2-7B-Instruct": "yuhuili/EAGLE-Qwen2-7B-Instruct",
    "Qwen/Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
}
"""Id of a target to the id of a head that was published for it."""


def known_head(target: str, embedded: Path) -> str:
    """Folder or id of a head for a target; empty where none is known.

    Args:
        target: folder or id, with or without a revision.
        embedded: folder of the embedded pair, whose target's heads lie beside it.
    """
    if target == str(embedded / "target"):
        head = embedded / "heads" / "eagle"
        return str(head) if (head / "config.json").is_file() else ""
    return PUBLISHED_HEADS.get(target.partition("@")[0], "")
