//! Notes the commit for records of measurements: `MOE_COMMIT` if it is set, what git says in a checkout, else the version.

use std::path::Path;
use std::process::Command;

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_string()).filter(|s| !s.is_empty())
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=MOE_COMMIT");
    // A tarball unpacked inside another repository has that one's commits, not its own.
    let checkout = Path::new(".git").exists();
    if checkout {
        for file in ["HEAD", "logs/HEAD"] {
            let path = git(&["rev-parse", "--git-path", file]).filter(|p| Path::new(p).exists());
            path.iter().for_each(|p| println!("cargo:rerun-if-changed={p}"));
        }
    }
    let given = std::env::var("MOE_COMMIT").ok().filter(|c| !c.is_empty());
    let found = given.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]).filter(|_| checkout));
    println!("cargo:rustc-env=MOE_COMMIT={}", found.unwrap_or_else(|| format!("v{}", env!("CARGO_PKG_VERSION"))));
}
