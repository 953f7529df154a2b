//! The `waspmq` command.

use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::EnvFilter;
use waspmq::bench::{self, BenchOptions};
use waspmq::plugins::trial::{self, PluginCommand};
use waspmq::serve::{self, ServeOptions};
use waspmq::store::{Database, schema};

/// A message broker on PostgreSQL.
#[derive(Parser)]
#[command(version, about)]
struct Cli {
    /// What is logged, as in RUST_LOG
    #[arg(long, env = "WASPMQ_LOG_LEVEL", default_value = "info", global = true)]
    log_level: String,
    /// How it is logged, to stderr
    #[arg(long, env = "WASPMQ_LOG_FORMAT", value_enum, default_value = "text", global = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Run the broker
    Serve(ServeOptions),
    /// Bring a database's schema up to date, and end
    Migrate {
        /// PostgreSQL, as a connection string or URL
        #[arg(long, env = "WASPMQ_DATABASE", hide_env_values = true)]
        database: String,
    },
    /// Make, check and try plugins
    #[command(subcommand)]
    Plugin(PluginCommand),
    /// Put load on a running broker, and check what it promises
    Bench(BenchOptions),
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let filter = match EnvFilter::try_new(&cli.log_level) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("waspmq: --log-level \"{}\" cannot be read: {error}", cli.log_level);
            return std::process::ExitCode::from(2);
        }
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match cli.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    let result = match &cli.command {
        Command::Serve(options) => serve::serve(options),
        Command::Migrate { database } => migrate(database),
        Command::Plugin(command) => trial::run(command),
        Command::Bench(options) => bench::bench(options),
    };
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("waspmq: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn migrate(database: &str) -> Result<(), String> {
    let config = serve::database_config(database)?;
    let database = Database::new(config, std::time::Duration::from_secs(60));
    let applied = schema::migrate(&database).map_err(|error| error.to_string())?;
    if applied.is_empty() {
        println!("the schema is up to date");
    }
    for migration in applied {
        println!("applied {migration}");
    }
    Ok(())
}
