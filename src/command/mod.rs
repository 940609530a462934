//! One file a subcommand: resolve, preflight, work, report.
