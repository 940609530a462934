//! Whether the tests of a GPU can run.

use moe::engine::cuda::Device;

/// Without a GPU: says so, and fails under `MOE_REQUIRE_GPU=1`.
pub fn has_gpu() -> bool {
    match Device::open(0) {
        Ok(_) => true,
        Err(reason) => {
            assert!(std::env::var_os("MOE_REQUIRE_GPU").is_none(), "{reason}");
            println!("SKIPPED: {reason}");
            false
        }
    }
}
