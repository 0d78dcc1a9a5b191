//! Byte sizes as people write them: `512MiB`, `1.5GiB`, `4096`.
//!
//! Units are binary. `K`, `KB` and `KiB` all mean 1,024 bytes, since a memory budget is never meant
//! in powers of ten; a decimal fraction is rounded down to whole bytes.

use crate::error::Error;

const UNITS: [(&str, u64); 5] =
    [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Reads a size.
///
/// ```
/// use ebbtide_core::size;
/// assert_eq!(size::parse("1.5GiB")?, 1_610_612_736);
/// assert_eq!(size::parse("512 mib")?, 536_870_912);
/// assert_eq!(size::parse("0")?, 0);
/// assert!(size::parse("-1MiB").is_err());
/// # Ok::<(), ebbtide_core::Error>(())
/// ```
///
/// # Errors
/// No number, a sign, an unknown unit, or more than `u64::MAX` bytes.
pub fn parse(text: &str) -> Result<u64, Error> {
    let wrong = |why: &str| {
        Error::setting(format!("size `{text}`: {why}"), "write it like 512MiB or 1.5GiB")
    };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..split], trimmed[split..].trim_start());
    if number.is_empty() {
        return Err(wrong("it does not start with a number"));
    }
    let unit =
        unit_bytes(unit).ok_or_else(|| wrong("the unit is none of B, KiB, MiB, GiB, TiB"))?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let whole: u128 = parse_digits(whole).ok_or_else(|| wrong("the number does not parse"))?;
    let numerator: u128 =
        parse_digits(fraction).ok_or_else(|| wrong("the number does not parse"))?;
    let scale = u32::try_from(fraction.len()).ok().and_then(|n| 10u128.checked_pow(n));
    let part = scale
        .and_then(|scale| Some(numerator.checked_mul(u128::from(unit))? / scale))
        .ok_or_else(|| wrong("the fraction has too many digits"))?;
    let bytes = whole.checked_mul(u128::from(unit)).and_then(|b| b.checked_add(part));
    bytes.and_then(|b| u64::try_from(b).ok()).ok_or_else(|| wrong("it is too large"))
}

fn parse_digits(text: &str) -> Option<u128> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

fn unit_bytes(unit: &str) -> Option<u64> {
    if unit.is_empty() {
        return Some(1);
    }
    let unit = unit.to_ascii_lowercase();
    UNITS.iter().find_map(|&(name, bytes)| {
        let full = name.to_ascii_lowercase();
        let letter = &full[..1];
        let short = full.len() == 3 && (unit == letter || unit == format!("{letter}b"));
        (unit == full || short).then_some(bytes)
    })
}

/// Writes a size with one decimal and the largest unit that keeps it at or above one.
///
/// ```
/// assert_eq!(ebbtide_core::size::format(1_610_612_736), "1.5 GiB");
/// assert_eq!(ebbtide_core::size::format(812), "812 B");
/// ```
pub fn format(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) if *unit > 1 => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        _ => format!("{bytes} B"),
    }
}

/// Like [`format()`], rounded up, so that what is printed is enough when it is [parsed](parse) again.
///
/// ```
/// use ebbtide_core::size;
/// assert_eq!(size::format_up((3 << 20) + 1), "3.1 MiB");
/// assert_eq!(size::format_up(3 << 20), "3.0 MiB");
/// ```
pub fn format_up(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) if *unit > 1 => {
            let tenths = (u128::from(bytes) * 10).div_ceil(u128::from(*unit));
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_parse() {
        let cases = [
            ("4096", 4096),
            ("1k", 1024),
            ("1KB", 1024),
            ("0.5KiB", 512),
            ("1.0000000000000000001MiB", 1 << 20),
            (" 2 TiB ", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ];
        for (text, bytes) in cases {
            assert_eq!(parse(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn sizes_that_do_not_parse_say_why() {
        for text in ["", "-1", "+1", "1..2", ".5", "5.", "1e3", "1 MiB x", "KiB", "1XiB", "nan"] {
            let error = parse(text).unwrap_err();
            assert!(error.is_setting() && error.hint().is_some(), "{text}");
            assert!(error.to_string().starts_with(&format!("size `{text}`")), "{error}");
        }
        for text in ["18446744073709551616", "99999999999999TiB"] {
            assert!(parse(text).unwrap_err().to_string().ends_with("it is too large"), "{text}");
        }
    }

    proptest::proptest! {
        /// Parsing never panics, whatever the text.
        #[test]
        fn any_text_is_a_size_or_an_error(text in "\\PC*") {
            let _ = parse(&text);
        }

        /// What is rounded up is enough, and at most a tenth of the unit too much.
        #[test]
        fn rounded_up_is_enough(bytes in 0..u64::MAX / 2) {
            let again = parse(&format_up(bytes)).unwrap();
            proptest::prop_assert!(again >= bytes);
            proptest::prop_assert!(again - bytes <= bytes / 10);
        }

        /// Every whole number of bytes survives being written out.
        #[test]
        fn whole_bytes_round_trip(bytes: u64) {
            proptest::prop_assert_eq!(parse(&bytes.to_string()).unwrap(), bytes);
        }
    }
}
