//! The same model on another machine.

use std::fmt;

use ebbtide_sim::predict::{Link, Model};

/// What is different. The default changes nothing.
///
/// ```
/// use ebbtide_plan::{WhatIf, predict, Plan, synthetic};
///
/// let model = synthetic::trace(4, 2, 0)?.model();
/// let slow = WhatIf { d2h_gbps: Some(0.5), compute_scale: Some(0.5), ..WhatIf::default() };
/// let slow = slow.apply(&model)?;
/// assert_eq!(slow.tiers[0].out.bytes_per_s, 0.5e9);
/// assert_eq!(slow.compute_ns(), model.compute_ns() / 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIf {
    /// 10^9 bytes a second from the device, on every tier that is left.
    pub d2h_gbps: Option<f64>,
    /// 10^9 bytes a second to the device, on every tier that is left.
    pub h2d_gbps: Option<f64>,
    /// All computing takes so many times as long.
    pub compute_scale: Option<f64>,
    /// Only this tier is used.
    pub tier: Option<String>,
}

/// A change that makes no sense.
#[derive(Clone, Debug, PartialEq)]
pub enum WhatIfError {
    /// A speed or a scale that is not above 0, or not finite.
    Number {
        /// Which.
        what: &'static str,
        /// What it is.
        found: f64,
    },
    /// There is no such tier.
    Tier {
        /// What was asked for.
        found: String,
        /// Those that there are.
        tiers: Vec<String>,
    },
}

impl WhatIfError {
    /// What can be done about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Number { .. } => "give a number between 0.000001 and 1000000",
            Self::Tier { .. } => "name one of the tiers of the trace",
        }
    }
}

impl fmt::Display for WhatIfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { what, found } => write!(f, "{what} of {found} makes no sense"),
            Self::Tier { found, tiers } => {
                let there = if tiers.is_empty() { "none".to_owned() } else { tiers.join(", ") };
                write!(f, "there is no tier `{found}`; there are: {there}")
            }
        }
    }
}

impl std::error::Error for WhatIfError {}

impl WhatIf {
    /// The model on the changed machine.
    ///
    /// # Errors
    /// A number that makes no sense, or a tier that is not there.
    pub fn apply(&self, model: &Model) -> Result<Model, WhatIfError> {
        let mut model = model.clone();
        if let Some(name) = &self.tier {
            let tiers: Vec<String> = model.tiers.iter().map(|tier| tier.name.clone()).collect();
            model.tiers.retain(|tier| tier.name == *name);
            if model.tiers.is_empty() {
                return Err(WhatIfError::Tier { found: name.clone(), tiers });
            }
        }
        let out = sensible("a bandwidth to the tier", self.d2h_gbps)?;
        let back = sensible("a bandwidth from the tier", self.h2d_gbps)?;
        for tier in &mut model.tiers {
            set(&mut tier.out, out);
            set(&mut tier.back, back);
        }
        if let Some(scale) = sensible("a scale of computing", self.compute_scale)? {
            scale_compute(&mut model, scale);
        }
        Ok(model)
    }
}

fn sensible(what: &'static str, number: Option<f64>) -> Result<Option<f64>, WhatIfError> {
    match number {
        Some(found) if !(1e-6..=1e6).contains(&found) => Err(WhatIfError::Number { what, found }),
        _ => Ok(number),
    }
}

/// What computing takes from the link stays in proportion.
fn set(link: &mut Link, gbps: Option<f64>) {
    if let Some(gbps) = gbps {
        let busy = link.bytes_per_s_busy / link.bytes_per_s;
        link.bytes_per_s = gbps * 1e9;
        link.bytes_per_s_busy = gbps * 1e9 * busy;
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^63")]
fn scale_compute(model: &mut Model, scale: f64) {
    let longer = |ns: &mut u64| *ns = (*ns as f64 * scale).round() as u64;
    longer(&mut model.fixed_ns);
    for layer in &mut model.layers {
        let ns = &mut layer.ns;
        [&mut ns.forward, &mut ns.recompute, &mut ns.backward].into_iter().for_each(longer);
    }
}
