//! Bad input: two lines on standard error, status 2, and nothing done. Cases C17 and C21.

mod common;

use std::fs;

use common::{Place, names, text};
use insta::assert_snapshot;

/// Runs the command where some files lie about; what it says, if it refuses as it should.
fn refused(args: &[&str]) -> String {
    let place = Place::new();
    let file = |name: &str, bytes: &[u8]| fs::write(place.path().join(name), bytes).unwrap();
    file("short.txt", b"too short");
    file("long.txt", "the tide goes out and the tide comes back\n".repeat(20).as_bytes());
    file("empty.bin", b"");
    let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    file("foreign.safetensors", &[&length[..], header, &[0; 4]].concat());
    let before = names(place.path());

    let output = place.run(args);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "", "standard output is for data");
    assert_eq!(names(place.path()), before, "something was written");
    assert_eq!(names(place.spill.path()), [""; 0], "something was spilled");
    let said = text(&output.stderr);
    assert!(said.starts_with("error: ") && said.contains("\nhint: "), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    said
}

fn refused_training(args: &[&str]) -> String {
    refused(&[&["train"], args].concat())
}

/// Zero of anything, heads that don't divide, and texts that are no number.
#[test]
fn c17_sizes_that_make_no_model() {
    assert_snapshot!(refused_training(&["--layers", "0"]), @r"
    error: --layers 0: there has to be at least one
    hint: the default is 12
    ");
    assert_snapshot!(refused_training(&["--d-model", "0"]), @r"
    error: --d-model 0: there has to be at least one
    hint: the default is 256
    ");
    assert_snapshot!(refused_training(&["--heads", "0"]), @r"
    error: --heads 0: there has to be at least one
    hint: the default is 8
    ");
    assert_snapshot!(refused_training(&["--seq", "0"]), @r"
    error: --seq 0: there has to be at least one
    hint: the default is 256
    ");
    assert_snapshot!(refused_training(&["--batch", "0"]), @r"
    error: --batch 0: there has to be at least one
    hint: the default is 4
    ");
    assert_snapshot!(refused_training(&["--heads", "3", "--d-model", "16"]), @r"
    error: --heads 3 does not divide --d-model 16
    hint: choose a width that is a multiple of the number of heads
    ");
    assert_snapshot!(refused_training(&["--layers", "two"]), @r"
    error: invalid value 'two' for '--layers <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--layers", "-1"]), @r"
    error: invalid value '-1' for '--layers <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--layers", "1.5"]), @r"
    error: invalid value '1.5' for '--layers <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--dtype", "f64"]), @r"
    error: invalid value 'f64' for '--dtype <TYPE>'
    hint: it is one of f32, bf16
    ");
}

#[test]
fn c17_training_settings_that_make_no_sense() {
    assert_snapshot!(refused_training(&["--steps", "0"]), @r"
    error: --steps 0: there has to be at least one
    hint: the default is 40
    ");
    assert_snapshot!(refused_training(&["--steps", "-3"]), @r"
    error: invalid value '-3' for '--steps <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--seed", "-1"]), @r"
    error: invalid value '-1' for '--seed <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--lr", "0"]), @r"
    error: --lr 0: a learning rate is finite and above zero
    hint: the default is 3e-4
    ");
    assert_snapshot!(refused_training(&["--lr", "-1"]), @r"
    error: --lr -1: a learning rate is finite and above zero
    hint: the default is 3e-4
    ");
    assert_snapshot!(refused_training(&["--lr", "nan"]), @r"
    error: --lr NaN: a learning rate is finite and above zero
    hint: the default is 3e-4
    ");
    assert_snapshot!(refused_training(&["--lr", "inf"]), @r"
    error: --lr inf: a learning rate is finite and above zero
    hint: the default is 3e-4
    ");
    assert_snapshot!(refused_training(&["--lr", "fast"]), @r"
    error: invalid value 'fast' for '--lr <RATE>': invalid float literal
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--sample", "0"]), @r"
    error: --sample 0 prints nothing
    hint: leave it out, or change what it depends on
    ");
}

#[test]
fn c17_policies_that_can_not_be_followed() {
    assert_snapshot!(refused_training(&["--policy", "nonsense"]), @r"
    error: policy `nonsense`: `nonsense` is neither a policy nor a range with one
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--policy", "0-12:swap"]), @r"
    error: policy `0-12:swap`: layer 12 does not exist, the last one is 11
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--policy", "0-3:swap,3-5:keep"]), @r"
    error: policy `0-3:swap,3-5:keep`: layer 3 is named twice
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--policy", "5-2:swap"]), @r"
    error: policy `5-2:swap`: the range 5-2 runs backwards
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--policy", "-1:swap"]), @r"
    error: policy `-1:swap`: `` is not the number of a layer
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--policy", ""]), @r"
    error: policy ``: `` is neither a policy nor a range with one
    hint: write plain, keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute
    ");
    assert_snapshot!(refused_training(&["--layers", "1", "--policy", "swap"]), @r"
    error: policy `swap` has no effect with one layer: the last layer is always kept
    hint: name the layer (--policy 0:swap), or use more layers or --policy keep
    ");
    assert_snapshot!(refused_training(&["--layers", "1", "--policy", "recompute"]), @r"
    error: policy `recompute` has no effect with one layer: the last layer is always kept
    hint: name the layer (--policy 0:recompute), or use more layers or --policy keep
    ");
}

#[test]
fn c17_budgets_and_rates_that_mean_nothing() {
    assert_snapshot!(refused_training(&["--memory", "101%"]), @r"
    error: memory `101%`: plain training needs no more than 100%
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(refused_training(&["--memory", "lots"]), @r"
    error: size `lots`: it does not start with a number
    hint: write it like 40%, 512MiB or 1.5GiB
    ");
    assert_snapshot!(refused_training(&["--throttle-gbps", "1"]), @r"
    error: --throttle-gbps 1: it is not two rates of at least 0.001
    hint: write gigabytes a second out and in, such as 0.5,0.5
    ");
    assert_snapshot!(refused_training(&["--tier", "host", "--throttle-gbps", "1,1"]), @r"
    error: --throttle-gbps has no effect with --tier host
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--memory", "50%", "--prefetch", "2"]), @r"
    error: --prefetch has no effect under a plan, which says what loads when
    hint: leave it out, or change what it depends on
    ");
}

/// C17: three ways to say the same thing exclude one another.
#[test]
fn c17_a_budget_a_policy_and_a_plan_exclude_each_other() {
    assert_snapshot!(refused_training(&["--memory", "50%", "--policy", "swap"]), @r"
    error: the argument '--memory <SIZE|PERCENT>' cannot be used with '--policy <POLICY>'
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--memory", "50%", "--plan", "p"]), @r"
    error: the argument '--memory <SIZE|PERCENT>' cannot be used with '--plan <FILE>'
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--policy", "keep", "--plan", "p"]), @r"
    error: the argument '--policy <POLICY>' cannot be used with '--plan <FILE>'
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused_training(&["--compare", "--plan", "short.txt"]), @r"
    error: --plan can't be used with --compare, which runs five trainings from the start
    hint: leave out --plan or --compare
    ");
}

/// A setting that silently does nothing is worse than an error.
#[test]
fn c17_tier_settings_without_effect() {
    assert_snapshot!(refused_training(&["--policy", "plain", "--tier", "file"]), @r"
    error: --tier has no effect: policy `plain` swaps no layer
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--policy", "keep", "--spill-dir", "."]), @r"
    error: --spill-dir has no effect: policy `keep` swaps no layer
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--policy", "0-3:recompute", "--prefetch", "2"]), @r"
    error: --prefetch has no effect: policy `0-3:recompute` swaps no layer
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--policy", "keep", "--host-bytes", "1MiB"]), @r"
    error: --host-bytes has no effect: policy `keep` swaps no layer
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--tier", "host", "--spill-dir", "."]), @r"
    error: --spill-dir has no effect with --tier host
    hint: leave it out, or change what it depends on
    ");
    assert_snapshot!(refused_training(&["--tier", "disk"]), @r"
    error: invalid value 'disk' for '--tier <TIER>'
    hint: it is one of file, host
    ");
    assert_snapshot!(refused_training(&["--host-bytes", "0"]), @r"
    error: --host-bytes 0: a tier can't work without memory
    hint: leave it out, or give a size such as 512MiB
    ");
    assert_snapshot!(refused_training(&["--host-bytes", "-1MiB"]), @r"
    error: size `-1MiB`: it does not start with a number
    hint: write it like 512MiB or 1.5GiB
    ");
    assert_snapshot!(refused_training(&["--host-bytes", "1XB"]), @r"
    error: size `1XB`: the unit is none of B, KiB, MiB, GiB, TiB
    hint: write it like 512MiB or 1.5GiB
    ");
    assert_snapshot!(refused_training(&["--prefetch", "-1"]), @r"
    error: invalid value '-1' for '--prefetch <N>': invalid digit found in string
    hint: `ebbtide train --help` lists what can be given
    ");
}

#[test]
fn c21_files_and_folders_that_can_not_be_used() {
    assert_snapshot!(refused_training(&["--text", "missing.txt"]), @r"
    error: can't read the text missing.txt: No such file or directory (os error 2)
    hint: name a readable file with --text
    ");
    assert_snapshot!(refused_training(&["--text", "."]), @r"
    error: can't read the text .: it is not a regular file
    hint: name a readable file with --text
    ");
    assert_snapshot!(refused_training(&["--text", "short.txt"]), @r"
    error: the text has 9 bytes, a sequence of 256 needs at least 257
    hint: name more text with --text, or make sequences shorter with --seq
    ");
    assert_snapshot!(refused_training(&["--spill-dir", "missing"]), @r"
    error: can't spill to the folder missing: No such file or directory (os error 2)
    hint: name an existing, writable folder with --spill-dir
    ");
    assert_snapshot!(refused_training(&["--spill-dir", "short.txt"]), @r"
    error: can't spill to the folder short.txt: Not a directory (os error 20)
    hint: name an existing, writable folder with --spill-dir
    ");
    assert_snapshot!(refused_training(&["--spill-dir", "/proc"]), @r"
    error: can't spill to the folder /proc: No such file or directory (os error 2)
    hint: name an existing, writable folder with --spill-dir
    ");
    assert_snapshot!(refused_training(&["--json", "missing/x.json"]), @r"
    error: --json can't write missing/x.json: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with --json
    ");
    assert_snapshot!(refused_training(&["--save", "missing/x"]), @r"
    error: --save can't write missing/x: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with --save
    ");
    assert_snapshot!(refused_training(&["--timeline", "missing/x"]), @r"
    error: --timeline can't write missing/x: No such file or directory (os error 2)
    hint: name a file in an existing, writable folder with --timeline
    ");
    assert_snapshot!(refused_training(&["--json", "."]), @r"
    error: --json can't write .: it is a folder
    hint: name a file in an existing, writable folder with --json
    ");
    assert_snapshot!(refused_training(&["--save", "/dev/null"]), @r"
    error: --save can't write /dev/null: it is not a regular file
    hint: name a file in an existing, writable folder with --save
    ");
    assert_snapshot!(refused_training(&["--json", "a", "--save", "a"]), @r"
    error: --json and --save name the same file a
    hint: name another file with --json
    ");
    assert_snapshot!(refused_training(&["--text", "long.txt", "--json", "./long.txt"]), @r"
    error: --json and --text name the same file ./long.txt
    hint: name another file with --json
    ");
}

#[test]
fn files_that_can_not_be_resumed() {
    assert_snapshot!(refused_training(&["--resume", "missing"]), @r"
    error: can't resume from missing: No such file or directory (os error 2)
    hint: name a file that `ebbtide train --save` has written
    ");
    assert_snapshot!(refused_training(&["--resume", "."]), @r"
    error: can't resume from .: it is not a regular file
    hint: name a file that `ebbtide train --save` has written
    ");
    assert_snapshot!(refused_training(&["--resume", "/dev/zero"]), @r"
    error: can't resume from /dev/zero: it is not a regular file
    hint: name a file that `ebbtide train --save` has written
    ");
    assert_snapshot!(refused_training(&["--resume", "long.txt"]), @r"
    error: can't resume from long.txt: it is no safetensors file, or not all of one
    hint: name a file that `ebbtide train --save` has written
    ");
    assert_snapshot!(refused_training(&["--resume", "empty.bin"]), @r"
    error: can't resume from empty.bin: it is no safetensors file, or not all of one
    hint: name a file that `ebbtide train --save` has written
    ");
    assert_snapshot!(refused_training(&["--resume", "foreign.safetensors"]), @r"
    error: can't resume from foreign.safetensors: ebbtide did not write it
    hint: name a file that `ebbtide train --save` has written
    ");
}

#[test]
fn settings_that_a_comparison_has_no_place_for() {
    assert_snapshot!(refused_training(&["--compare", "--policy", "swap"]), @r"
    error: --policy can't be used with --compare, which runs five trainings from the start
    hint: leave out --policy or --compare
    ");
    assert_snapshot!(refused_training(&["--compare", "--save", "x"]), @r"
    error: --save can't be used with --compare, which runs five trainings from the start
    hint: leave out --save or --compare
    ");
    assert_snapshot!(refused_training(&["--compare", "--resume", "x"]), @r"
    error: --resume can't be used with --compare, which runs five trainings from the start
    hint: leave out --resume or --compare
    ");
    assert_snapshot!(refused_training(&["--compare", "--sample", "5"]), @r"
    error: --sample can't be used with --compare, which runs five trainings from the start
    hint: leave out --sample or --compare
    ");
    assert_snapshot!(refused_training(&["--compare", "--timeline", "x"]), @r"
    error: --timeline can't be used with --compare, which runs five trainings from the start
    hint: leave out --timeline or --compare
    ");
}

#[test]
fn commands_and_flags_that_do_not_exist() {
    assert_snapshot!(refused(&[]), @r"
    error: no command was given
    hint: `ebbtide train` trains a model; `ebbtide --help` lists all there is
    ");
    assert_snapshot!(refused(&["trian"]), @r"
    error: unrecognized subcommand 'trian'
    hint: did you mean train?
    ");
    assert_snapshot!(refused(&["train", "--layrs", "3"]), @r"
    error: unexpected argument '--layrs' found
    hint: did you mean --layers?
    ");
    assert_snapshot!(refused(&["train", "--layers"]), @r"
    error: a value is required for '--layers <N>' but none was supplied
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused(&["train", "extra"]), @r"
    error: unexpected argument 'extra' found
    hint: `ebbtide train --help` lists what can be given
    ");
    assert_snapshot!(refused(&["worker"]), @r"
    error: the following required arguments were not provided: --parent <PARENT>
    hint: `ebbtide train --help` lists what can be given
    ");
}

#[test]
fn models_that_no_policy_could_fit_are_refused_before_they_are_made() {
    for sizes in [["--layers", "99999999999"], ["--d-model", "9223372036854775808"]] {
        let said = refused_training(&sizes);
        assert!(said.starts_with("error: a model of this size needs "), "{said}");
    }
}

/// The check of a file that is there but cut short, whose end is what is missing.
#[test]
fn a_saved_run_that_is_cut_short_can_not_be_resumed() {
    let place = Place::new();
    place.trained(&["--steps", "1", "--policy", "plain", "--save", "whole"]);
    let mut bytes = place.bytes("whole");
    bytes.truncate(bytes.len() - 1);
    fs::write(place.path().join("cut"), bytes).unwrap();
    let output = place.run(&["train", "--resume", "cut"]);
    assert_eq!(output.status.code(), Some(2));
    assert_snapshot!(text(&output.stderr), @r"
    error: can't resume from cut: it is no safetensors file, or not all of one
    hint: name a file that `ebbtide train --save` has written
    ");
}
