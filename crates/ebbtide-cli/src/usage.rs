//! clap's answers in the command's own form: help on standard output, and errors as two lines.

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::Cli;
use crate::failure::Failure;
use crate::output::Printer;

/// Prints what was asked for, or turns the error into one of ours.
pub(crate) fn answer(error: &clap::Error) -> Result<u8, Failure> {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return Printer::data(&error.to_string()).map(|()| 0);
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let hint = "`ebbtide train` trains a model; `ebbtide --help` lists all there is";
        return Err(Failure::bad_input("no command was given", hint));
    }
    let text = error.to_string();
    // clap's first paragraph is the message; possible values and usage come after it.
    let first = text.lines().take_while(|line| !line.trim().is_empty());
    let message: Vec<_> = first.filter(|line| !line.trim_start().starts_with('[')).collect();
    let message = message.join(" ");
    Err(Failure::bad_input(message.trim_start_matches("error: "), hint(error)))
}

fn hint(error: &clap::Error) -> String {
    let listed = |kind| match error.get(kind) {
        Some(ContextValue::String(value)) => Some(value.clone()),
        Some(ContextValue::Strings(values)) if !values.is_empty() => Some(values.join(", ")),
        _ => None,
    };
    let likeliest = |kind| match error.get(kind) {
        Some(ContextValue::String(name)) => Some(name.clone()),
        // clap lists them with the likeliest last.
        Some(ContextValue::Strings(names)) => names.last().cloned(),
        _ => None,
    };
    let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand];
    let suggested = suggested.into_iter().find_map(likeliest);
    if let Some(name) = suggested {
        return format!("did you mean {name}?");
    }
    match listed(ContextKind::ValidValue) {
        Some(values) => format!("it is one of {values}"),
        None => format!("`ebbtide {} --help` lists what can be given", command()),
    }
}

/// The command that was called, as far as one can tell; clap's errors name it only in their usage.
fn command() -> String {
    let first = std::env::args_os().nth(1).unwrap_or_default();
    let cli = Cli::command();
    let known = cli.find_subcommand(first).filter(|command| !command.is_hide_set());
    known.map_or("train", clap::Command::get_name).to_owned()
}
