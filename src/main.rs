//! Parses, dispatches, prints the error chain, returns the exit code.

use clap::Parser;
use moe::cli::Cli;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let usage = error.use_stderr();
            return if error.print().is_ok() && !usage { ExitCode::SUCCESS } else { ExitCode::from(1) };
        }
    };
    match moe::command::dispatch(cli) {
        Ok(status) => ExitCode::from(status as u8),
        Err(error) => {
            moe::report::error(&format!("{error:#}"), moe::command::hint(&error).as_deref());
            ExitCode::from(moe::command::exit_status(&error) as u8)
        }
    }
}
