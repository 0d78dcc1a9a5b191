//! `--memory` and `--throttle-gbps` as numbers.

use ebbtide_candle::Memory;
use ebbtide_core::MemoryBudget;

use crate::failure::Failure;

/// What `train` does when nothing is said; a small model gets more where that is too little.
const DEFAULT: Memory = Memory::PercentOrLeast(40.);

/// Reads `700MiB` or `40%`.
pub(crate) fn memory(text: Option<&str>) -> Result<Memory, Failure> {
    let Some(text) = text else { return Ok(DEFAULT) };
    Ok(match MemoryBudget::parse(text)? {
        MemoryBudget::Bytes(bytes) => Memory::Bytes(bytes),
        MemoryBudget::Percent(percent) => Memory::Percent(percent),
    })
}

/// Reads `0.5,0.8`: gigabytes a second, out and in.
pub(crate) fn throttle(text: &str) -> Result<(f64, f64), Failure> {
    let rate = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        text.parse::<f64>().ok().filter(|rate| digits && *rate >= 0.001 && *rate <= 1e6)
    };
    let rates = text.split_once(',').map(|(out, back)| (rate(out.trim()), rate(back.trim())));
    match rates {
        Some((Some(out), Some(back))) => Ok((out, back)),
        _ => Err(Failure::bad_input(
            format!("--throttle-gbps {text}: it is not two rates of at least 0.001"),
            "write gigabytes a second out and in, such as 0.5,0.5",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_parts_are_read() {
        assert_eq!(memory(Some("1MiB")).unwrap(), Memory::Bytes(1 << 20));
        assert_eq!(memory(Some("12.5 %")).unwrap(), Memory::Percent(12.5));
        for wrong in ["-1%", "nan%", "inf%", "%", "1e3%", "101%", "four"] {
            assert!(memory(Some(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rates_are_a_pair() {
        assert_eq!(throttle("0.5,1").unwrap(), (0.5, 1.));
        for wrong in ["", "1", "1,", "0,1", "1,-1", "1,2,3", "nan,1"] {
            assert!(throttle(wrong).is_err(), "{wrong}");
        }
    }
}
