//! A budget of device memory as people write it: `1.5GiB`, or `40%` of what plain training needs.

use crate::error::Error;
use crate::size;

/// How many bytes of the device a training step may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryBudget {
    /// So many bytes in all.
    Bytes(u64),
    /// So many percent of what plain training needs beyond what is always there, from 0 to 100.
    Percent(f64),
}

impl MemoryBudget {
    /// Reads a [size] or a percentage.
    ///
    /// ```
    /// use ebbtide_core::MemoryBudget;
    /// assert_eq!(MemoryBudget::parse("512MiB")?, MemoryBudget::Bytes(512 << 20));
    /// assert_eq!(MemoryBudget::parse("37.5 %")?, MemoryBudget::Percent(37.5));
    /// assert!(MemoryBudget::parse("140%").is_err());
    /// # Ok::<(), ebbtide_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// It is no size, and no percentage from 0 to 100.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let hint = "write it like 40%, 512MiB or 1.5GiB";
        let Some(number) = text.trim().strip_suffix('%') else {
            return size::parse(text).map(Self::Bytes).map_err(|error| error.with_hint(hint));
        };
        let wrong = |why: &str| Error::setting(format!("memory `{text}`: {why}"), hint);
        let number = number.trim_end();
        // No sign, no exponent, no name of a number: those are never meant.
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        if !digits(whole) || !digits(fraction) {
            return Err(wrong("there is no number before the %"));
        }
        let percent: f64 = number.parse().map_err(|_| wrong("the number does not parse"))?;
        if percent > 100.0 {
            return Err(wrong("plain training needs no more than 100%"));
        }
        Ok(Self::Percent(percent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_and_sizes() {
        let cases = [
            ("0%", MemoryBudget::Percent(0.0)),
            (" 100 % ", MemoryBudget::Percent(100.0)),
            ("12.25%", MemoryBudget::Percent(12.25)),
            ("0", MemoryBudget::Bytes(0)),
            ("1.5 GiB", MemoryBudget::Bytes(3 << 29)),
        ];
        for (text, budget) in cases {
            assert_eq!(MemoryBudget::parse(text).unwrap(), budget, "{text}");
        }
    }

    #[test]
    fn what_is_neither_says_why() {
        let wrong = ["", "%", "-5%", "+5%", "1e1%", "nan%", "inf%", ".5%", "5.%", "5%%", "100.1%"];
        for text in wrong {
            let error = MemoryBudget::parse(text).unwrap_err();
            assert!(error.is_setting() && error.hint().is_some(), "{text}");
        }
    }

    proptest::proptest! {
        /// Parsing never panics, and never gives more than all.
        #[test]
        fn any_text_is_a_budget_or_an_error(text in "\\PC*%?") {
            if let Ok(MemoryBudget::Percent(percent)) = MemoryBudget::parse(&text) {
                proptest::prop_assert!((0.0..=100.0).contains(&percent));
            }
        }
    }
}
