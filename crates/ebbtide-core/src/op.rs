//! The operations of a training step, in the order in which they run.
//!
//! A step of `L` layers is `F_0 … F_{L-1}`, then for each layer from the last to the first
//! `R_i` (only if the layer is recomputed) and `B_i`. Every one of them has an index from 0 to
//! `3 L - 1`, whether or not the `R_i` takes place, so that indices of two plans can be compared.

use std::fmt;

/// Which of a layer's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// The forward of a layer.
    Forward,
    /// Its forward for a second time, right before its backward.
    Recompute,
    /// Its backward.
    Backward,
}

impl Phase {
    /// The letter that files use: `F`, `R` or `B`.
    pub fn letter(self) -> char {
        match self {
            Self::Forward => 'F',
            Self::Recompute => 'R',
            Self::Backward => 'B',
        }
    }
}

/// One operation of a step.
///
/// ```
/// use ebbtide_core::{Op, Phase};
/// let order: Vec<String> = (0..6).map(|at| Op::at(at, 2).to_string()).collect();
/// assert_eq!(order, ["F0", "F1", "R1", "B1", "R0", "B0"]);
/// assert_eq!(Op::new(Phase::Backward, 1).index(2), 3);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    /// Which of the layer's operations.
    pub phase: Phase,
    /// The layer, from 0.
    pub layer: usize,
}

impl Op {
    /// This operation of this layer.
    pub fn new(phase: Phase, layer: usize) -> Self {
        Self { phase, layer }
    }

    /// Its place in a step of `layers` layers.
    ///
    /// # Panics
    /// The step has no such layer.
    pub fn index(self, layers: usize) -> usize {
        assert!(self.layer < layers, "{self} in a step of {layers} layers");
        let pair = layers + 2 * (layers - 1 - self.layer);
        match self.phase {
            Phase::Forward => self.layer,
            Phase::Recompute => pair,
            Phase::Backward => pair + 1,
        }
    }

    /// The operation at this place of a step of `layers` layers.
    ///
    /// # Panics
    /// The step has fewer than `index + 1` operations.
    pub fn at(index: usize, layers: usize) -> Self {
        assert!(index < 3 * layers, "operation {index} in a step of {layers} layers");
        if index < layers {
            return Self::new(Phase::Forward, index);
        }
        let layer = layers - 1 - (index - layers) / 2;
        let phase =
            if (index - layers).is_multiple_of(2) { Phase::Recompute } else { Phase::Backward };
        Self::new(phase, layer)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.phase.letter(), self.layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_one_operation() {
        for layers in 1..9 {
            for index in 0..3 * layers {
                assert_eq!(Op::at(index, layers).index(layers), index);
            }
        }
    }
}
