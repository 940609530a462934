//! A Hugging Face checkpoint directory: config, shard index, mapped safetensors.
