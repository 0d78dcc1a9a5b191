//! Keep, swap or recompute, for each layer, and the text form of it.

use std::fmt;
use std::ops::RangeInclusive;

use crate::LayerId;
use crate::error::Error;

/// What happens to the bytes that a layer saves for backward. Bytes that backward never reads are
/// dropped under each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// They stay on the device.
    #[default]
    Keep,
    /// They move to the tier after the layer's forward and come back for its backward.
    Swap,
    /// They are dropped and made again by running the layer's forward a second time.
    Recompute,
}

impl Policy {
    /// The word used in policy texts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Swap => "swap",
            Self::Recompute => "recompute",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        [Self::Keep, Self::Swap, Self::Recompute].into_iter().find(|p| p.name() == name)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a policy function may answer for an operation or a tensor (row W1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CheckpointPolicy {
    /// Keep the value, whatever else would be cheaper.
    MustSave,
    /// Keep it if nothing speaks against it.
    PreferSave,
    /// Drop it and make it again.
    MustRecompute,
    /// Drop it if nothing speaks against it.
    PreferRecompute,
    /// Move it out and bring it back.
    MustSwap,
}

impl CheckpointPolicy {
    /// The name that Python code uses.
    pub fn name(self) -> &'static str {
        match self {
            Self::MustSave => "MUST_SAVE",
            Self::PreferSave => "PREFER_SAVE",
            Self::MustRecompute => "MUST_RECOMPUTE",
            Self::PreferRecompute => "PREFER_RECOMPUTE",
            Self::MustSwap => "MUST_SWAP",
        }
    }
}

/// What can be done with one saved tensor by itself: nothing can recompute it there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorPolicy {
    /// It stays on the device.
    Keep,
    /// It is swapped.
    Swap,
}

impl TryFrom<CheckpointPolicy> for TensorPolicy {
    type Error = Error;

    /// ```
    /// use ebbtide_core::{CheckpointPolicy, TensorPolicy};
    /// assert_eq!(TensorPolicy::try_from(CheckpointPolicy::MustSwap).unwrap(), TensorPolicy::Swap);
    /// let error = TensorPolicy::try_from(CheckpointPolicy::PreferSave).unwrap_err();
    /// assert_eq!(error.to_string(), "PREFER_SAVE is no policy for a single tensor");
    /// ```
    fn try_from(policy: CheckpointPolicy) -> Result<Self, Error> {
        match policy {
            CheckpointPolicy::MustSave => Ok(Self::Keep),
            CheckpointPolicy::MustSwap => Ok(Self::Swap),
            other => {
                let message = format!("{} is no policy for a single tensor", other.name());
                Err(Error::setting(message, "answer MUST_SAVE or MUST_SWAP"))
            }
        }
    }
}

/// One [`Policy`] for each layer of a model.
///
/// ```
/// use ebbtide_core::{LayerId, Policies, Policy};
/// let policies = Policies::parse("0-7:swap,8-10:recompute", 12)?;
/// assert_eq!(policies.get(LayerId(3)), Policy::Swap);
/// assert_eq!(policies.get(LayerId(10)), Policy::Recompute);
/// assert_eq!(policies.get(LayerId(11)), Policy::Keep);
/// // A single word means every layer but the last, whose backward comes next anyway.
/// assert_eq!(Policies::parse("swap", 12)?.to_string(), "0-10:swap,11:keep");
/// # Ok::<(), ebbtide_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policies(Vec<Policy>);

impl Policies {
    /// The same policy for all of `layers` layers, the last one too.
    pub fn uniform(policy: Policy, layers: usize) -> Self {
        Self(vec![policy; layers])
    }

    /// The policy for all layers but the last, which is kept: its backward comes next (row G9).
    pub fn all_but_last(policy: Policy, layers: usize) -> Self {
        let mut policies = vec![policy; layers];
        if let Some(last) = policies.last_mut() {
            *last = Policy::Keep;
        }
        Self(policies)
    }

    /// Reads `keep`, `swap`, `recompute`, or inclusive ranges from 0 such as
    /// `0-7:swap,8-10:recompute`. Layers that no range names are kept.
    ///
    /// # Errors
    /// An unknown word, a range that does not parse, runs backwards, overlaps another one or names
    /// a layer that the model does not have.
    pub fn parse(text: &str, layers: usize) -> Result<Self, Error> {
        if let Some(policy) = Policy::from_name(text) {
            return Ok(Self::all_but_last(policy, layers));
        }
        let mut named: Vec<Option<Policy>> = vec![None; layers];
        for part in text.split(',') {
            let (range, policy) = parse_part(text, part)?;
            for layer in range {
                let slot = named.get_mut(layer).ok_or_else(|| {
                    let last = layers.saturating_sub(1);
                    wrong(text, &format!("layer {layer} does not exist, the last one is {last}"))
                })?;
                if slot.replace(policy).is_some() {
                    return Err(wrong(text, &format!("layer {layer} is named twice")));
                }
            }
        }
        Ok(Self(named.into_iter().map(Option::unwrap_or_default).collect()))
    }

    /// The policy of a layer; [`Policy::Keep`] for one that is out of range.
    pub fn get(&self, layer: LayerId) -> Policy {
        self.0.get(layer.0 as usize).copied().unwrap_or_default()
    }

    /// Number of layers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is no layer at all.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The policies in order of layer.
    pub fn iter(&self) -> impl Iterator<Item = Policy> + '_ {
        self.0.iter().copied()
    }
}

impl fmt::Display for Policies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut start = 0;
        for run in self.0.chunk_by(|a, b| a == b) {
            let end = start + run.len() - 1;
            let comma = if start == 0 { "" } else { "," };
            match run.len() {
                1 => write!(f, "{comma}{start}:{}", run[0])?,
                _ => write!(f, "{comma}{start}-{end}:{}", run[0])?,
            }
            start = end + 1;
        }
        Ok(())
    }
}

fn wrong(text: &str, why: &str) -> Error {
    Error::setting(
        format!("policy `{text}`: {why}"),
        "write keep, swap, recompute, or ranges of layers from 0 such as 0-7:swap,8-10:recompute",
    )
}

fn parse_part(text: &str, part: &str) -> Result<(RangeInclusive<usize>, Policy), Error> {
    let Some((range, name)) = part.split_once(':') else {
        return Err(wrong(text, &format!("`{part}` is neither a policy nor a range with one")));
    };
    let policy = Policy::from_name(name.trim())
        .ok_or_else(|| wrong(text, &format!("`{}` is not a policy", name.trim())))?;
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let number = |text_number: &str| {
        let digits = text_number.trim();
        let plain = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let parsed = if plain { digits.parse::<usize>().ok() } else { None };
        parsed.ok_or_else(|| wrong(text, &format!("`{digits}` is not the number of a layer")))
    };
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(wrong(text, &format!("the range {first}-{last} runs backwards")));
    }
    Ok((first..=last, policy))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C17: a policy that can't have the effect it asks for is an error that names the layer.
    #[test]
    fn c17_policies_that_make_no_sense_are_errors() {
        let cases = [
            ("", "`` is neither a policy nor a range with one"),
            ("swp", "`swp` is neither a policy nor a range with one"),
            ("0-3:swp", "`swp` is not a policy"),
            ("a-3:swap", "`a` is not the number of a layer"),
            ("-3:swap", "`` is not the number of a layer"),
            ("0-:swap", "`` is not the number of a layer"),
            ("3-1:swap", "the range 3-1 runs backwards"),
            ("0-3:swap,3-4:keep", "layer 3 is named twice"),
            ("2:swap,2:swap", "layer 2 is named twice"),
            ("5-12:swap", "layer 12 does not exist, the last one is 11"),
            ("0-99999999999999999999:swap", "`99999999999999999999` is not the number of a layer"),
            ("0-3:swap,", "`` is neither a policy nor a range with one"),
        ];
        for (text, why) in cases {
            let error = Policies::parse(text, 12).unwrap_err();
            assert_eq!(error.to_string(), format!("policy `{text}`: {why}"));
            assert!(error.hint().is_some() && error.is_setting());
        }
    }

    /// G9: a single word keeps the last layer; ranges may name it.
    #[test]
    fn g9_the_last_layer_is_kept_unless_named() {
        let policies = Policies::parse("recompute", 3).unwrap();
        assert_eq!(policies.to_string(), "0-1:recompute,2:keep");
        let policies = Policies::parse("0-2:recompute", 3).unwrap();
        assert_eq!(policies.to_string(), "0-2:recompute");
        assert_eq!(Policies::parse("swap", 1).unwrap().to_string(), "0:keep");
    }

    proptest::proptest! {
        /// A policy survives being written out, and parsing never panics.
        #[test]
        fn policies_round_trip(words in proptest::collection::vec(0..3u8, 1..40)) {
            let all = [Policy::Keep, Policy::Swap, Policy::Recompute];
            let policies = Policies(words.iter().map(|&w| all[w as usize]).collect());
            let again = Policies::parse(&policies.to_string(), policies.len()).unwrap();
            proptest::prop_assert_eq!(again, policies);
        }

        #[test]
        fn any_text_is_a_policy_or_an_error(text in "[0-9:,a-z-]{0,20}", layers in 0..20usize) {
            let _ = Policies::parse(&text, layers);
        }
    }
}
