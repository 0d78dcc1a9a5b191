//! The files and folders of the command line, looked at before any work.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::args::{OutputArgs, TrainingArgs};
use crate::failure::Failure;
use crate::files::{self, resolved};

/// Texts have to be regular files: each process of a run reads them again.
pub(crate) fn inputs(text: &[PathBuf]) -> Result<(), Failure> {
    for path in text {
        let hint = "name a readable file with --text";
        let wrong = |why: &str| {
            Failure::bad_input(format!("can't read the text {}: {why}", path.display()), hint)
        };
        let metadata = fs::metadata(path).map_err(|error| wrong(&error.to_string()))?;
        if !metadata.is_file() {
            return Err(wrong("it is not a regular file"));
        }
    }
    Ok(())
}

/// Output files have to be writable, apart from one another and from what is read.
pub(crate) fn outputs(training: &TrainingArgs, output: &OutputArgs) -> Result<(), Failure> {
    let targets = [
        ("--save", training.save.as_deref()),
        ("--json", output.json.as_deref()),
        ("--timeline", output.timeline.as_deref()),
    ];
    let mut taken: Vec<(&str, PathBuf)> =
        training.text.iter().map(|path| ("--text", resolved(path))).collect();
    let resumed = training.resume.as_deref().map(resolved);
    for (flag, path) in targets {
        let Some(path) = path else { continue };
        target(flag, path)?;
        let file = resolved(path);
        // Saving over the file that was resumed is what one does.
        let resumed = resumed.iter().filter(|_| flag != "--save").map(|p| ("--resume", p.clone()));
        let clash = taken.iter().cloned().chain(resumed).find(|(_, other)| *other == file);
        if let Some((other, _)) = clash {
            return Err(Failure::bad_input(
                format!("{flag} and {other} name the same file {}", path.display()),
                format!("name another file with {flag}"),
            ));
        }
        taken.push((flag, file));
    }
    Ok(())
}

/// The file that `flag` names has to be writable, and is not written yet.
pub(crate) fn target(flag: &str, path: &Path) -> Result<(), Failure> {
    let wrong = |why: &str| {
        Failure::bad_input(
            format!("{flag} can't write {}: {why}", path.display()),
            format!("name a file in an existing, writable folder with {flag}"),
        )
    };
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => return Err(wrong("it is a folder")),
        Ok(metadata) if !metadata.is_file() || files::is_stdout(path) => {
            // A pipe or a device: nothing is made in its folder. A state is too dear for one.
            return match flag {
                "--save" if metadata.is_file() => Err(wrong("it is standard output")),
                "--save" => Err(wrong("it is not a regular file")),
                _ => Ok(()),
            };
        }
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(wrong(&error.to_string())),
        _ => {}
    }
    if path.file_name().is_none() {
        return Err(wrong("it has no name"));
    }
    if path.as_os_str().as_bytes().ends_with(b"/") {
        return Err(wrong("it is the name of a folder"));
    }
    // The folder that is written to is that of the file a link points to.
    files::probe(&files::folder(&resolved(path))).map_err(|error| wrong(&error.to_string()))
}

/// The folder of the spill file, which `flag` names, has to take files.
pub(crate) fn spill_folder(flag: &str, folder: &Path) -> Result<(), Failure> {
    files::probe(folder).map_err(|error| {
        Failure::bad_input(
            format!("can't spill to the folder {}: {error}", folder.display()),
            format!("name an existing, writable folder with {flag}"),
        )
    })
}
