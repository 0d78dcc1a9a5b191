//! Whether runs of the same training gave the same, to the bit.

use std::fmt::Write;

use crate::trainer::Outcome;

/// Where a run first departs from the plain one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Agreement {
    /// Steps that both runs have.
    pub(crate) steps: usize,
    /// The first of them, in the whole training's count, that differs.
    pub(crate) differs_at: Option<u64>,
}

/// Compares losses and gradients of the steps that both runs have.
pub(crate) fn agreement(plain: &Outcome, other: &Outcome) -> Agreement {
    let mut pairs = plain.records.iter().zip(&other.records);
    Agreement {
        steps: pairs.len(),
        differs_at: pairs.find(|(a, b)| !a.same_result(b)).map(|(a, _)| a.step),
    }
}

/// Whether all runs agree with the first; nothing if no step can be compared.
pub(crate) fn identical(outcomes: &[Outcome]) -> Option<bool> {
    let (plain, others) = outcomes.split_first()?;
    let all: Vec<_> = others.iter().map(|other| agreement(plain, other)).collect();
    let compared = !all.is_empty() && all.iter().all(|a| a.steps > 0);
    compared.then(|| all.iter().all(|a| a.differs_at.is_none()))
}

/// One line for each run that differs, or one that says none does.
pub(crate) fn sentence(outcomes: &[Outcome]) -> String {
    let Some((plain, others)) = outcomes.split_first() else {
        return String::new();
    };
    let mut text = String::new();
    for other in others {
        let Agreement { steps, differs_at } = agreement(plain, other);
        if let Some(step) = differs_at {
            let mode = other.mode.name();
            let _ =
                writeln!(text, "losses or gradients of {mode} DIFFER from plain at step {step}");
        } else if others.len() == 1 && steps > 0 {
            let first = if steps == 1 { "step".to_owned() } else { format!("{steps} steps") };
            let _ =
                writeln!(text, "losses and gradients of the first {first}: bit-identical to plain");
        }
    }
    if others.len() > 1 && identical(outcomes) == Some(true) {
        text.push_str("losses and gradients: bit-identical\n");
    }
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::config::Mode;

    /// A run as its JSON, which is how it crosses processes.
    pub(crate) fn outcome(mode: &Mode, losses: &[f32]) -> Outcome {
        let records: Vec<_> = (1u64..)
            .zip(losses)
            .map(|(step, loss)| {
                serde_json::json!({
                    "step": step, "loss_bits": loss.to_bits(), "ms": 10. * step as f64,
                    "gradients": {"xxh3": 7, "tensors": 2, "bytes": 8}, "peak_bytes": 3 << 20,
                })
            })
            .collect();
        let totals = serde_json::json!({
            "probe_ms": 1., "moved_out_bytes": 2048, "moved_in_bytes": 2048, "dropped_bytes": 4096,
            "recompute_ms": 0., "wait_ms": 1500., "missed_prefetches": 2,
        });
        let tier = (*mode != Mode::Plain).then_some("file");
        serde_json::from_value(serde_json::json!({
            "mode": mode, "tier": tier, "records": records, "base_bytes": 1 << 20,
            "peak_bytes": 3 << 20, "peak_rss_bytes": 9 << 20, "totals": totals,
        }))
        .unwrap()
    }

    fn policy(text: &str, losses: &[f32]) -> Outcome {
        outcome(&Mode::Policy(text.into()), losses)
    }

    #[test]
    fn a_differing_bit_is_found_and_named() {
        let runs = [
            outcome(&Mode::Plain, &[1., 0.]),
            policy("keep", &[1., 0.]),
            policy("swap", &[1., -0.]),
        ];
        assert_eq!(identical(&runs), Some(false));
        let sentence = sentence(&runs);
        assert_eq!(sentence, "losses or gradients of swap DIFFER from plain at step 2\n");
    }

    #[test]
    fn steps_that_only_one_run_has_are_left_out() {
        let runs = [outcome(&Mode::Plain, &[1., f32::NAN]), policy("swap", &[1., f32::NAN, 3.])];
        assert_eq!(identical(&runs), Some(true));
        let expected = "losses and gradients of the first 2 steps: bit-identical to plain\n";
        assert_eq!(sentence(&runs), expected);
        assert_eq!(identical(&[outcome(&Mode::Plain, &[1.]), policy("swap", &[])]), None);
        assert_eq!(identical(&runs[..1]), None);
    }
}
