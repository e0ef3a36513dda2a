//! The command line tool `kvtier`.

fn main() -> std::process::ExitCode {
    kvtier_cli::main()
}
