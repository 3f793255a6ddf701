//! The `gantry` program; everything is in the library.

fn main() -> std::process::ExitCode {
    gantry::cli::main()
}
