//! What limits swapping on this machine, and what to do about it.

use ebbtide_core::size;

use super::findings::Findings;
use super::folder::Folder;
use super::wear::{Wear, round_trip_gb_per_s};

/// Below this a step of common size does not hide its copies: 10^9 bytes out and back a second.
const SLOW_GB_PER_S: f64 = 0.25;
/// Years of full use that a rated drive should last.
const YEARS: f64 = 3.;

/// One sentence for each thing that limits, without a full stop; nothing if all is well.
pub(super) fn of(findings: &Findings) -> Vec<String> {
    let folder = &findings.folder;
    let mut advice = Vec::new();
    if folder.in_ram {
        advice.push(format!(
            "{} is RAM ({}): swapping there saves nothing; name a folder on a disk",
            folder.path, folder.file_system,
        ));
    } else if let Some(why) = &folder.why_not_direct {
        advice.push(format!("{why}; the figures of the disk are partly those of RAM"));
    }
    advice.extend(tiny(folder));
    advice.extend(slow(folder));
    advice.extend(small(folder, findings.memory.may_use_bytes));
    advice.extend(worn(findings.wear.as_ref()));
    if !findings.cuda.is_absent() && !findings.cuda.is_usable() {
        advice.push(
            "a part of a CUDA driver is there and another is missing; programs can't use the card"
                .to_owned(),
        );
    }
    advice
}

fn tiny(folder: &Folder) -> Option<String> {
    folder.is_tiny().then(|| {
        format!(
            "{} is too small for a spill file: only {} could be measured, which says little about \
             its speed",
            folder.path,
            size::format(folder.measured_bytes)
        )
    })
}

fn slow(folder: &Folder) -> Option<String> {
    let gb_per_s = round_trip_gb_per_s(folder.write_gb_per_s, folder.read_gb_per_s);
    (!folder.in_ram && gb_per_s < SLOW_GB_PER_S).then(|| {
        format!(
            "this disk is slow for swapping: 1 GiB takes {:.0} s to go out and come back, so swap \
             layers whose steps are long and recompute the others",
            1.074 / gb_per_s
        )
    })
}

fn small(folder: &Folder, memory: Option<u64>) -> Option<String> {
    let (free, memory) = (folder.free_bytes?, memory?);
    (!folder.in_ram && free < memory).then(|| {
        format!(
            "{} has {} free, less than the memory; the spill file can't grow beyond that",
            folder.path,
            size::format(free)
        )
    })
}

fn worn(wear: Option<&Wear>) -> Option<String> {
    wear.filter(|wear| wear.days_to_rating < YEARS * 365.).map(|_| {
        "if the disk is an SSD, mind its wear: `moved out` of `ebbtide train` is what a run writes; \
         recompute writes nothing"
            .to_owned()
    })
}
