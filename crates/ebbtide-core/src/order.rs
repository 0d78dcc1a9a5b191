//! Which group will be needed next.
//!
//! Prefetch is a hint: a wrong guess costs a wait, never a value. The guess comes from the order in
//! which the previous backward asked for layers (row M11). Before there is one, and where a step
//! deviates from it, groups are expected in the reverse of the order in which they were opened,
//! which is right for every chain.

use crate::LayerId;

/// Groups that one backward can ask for and still be learnt.
const MOST: usize = 1 << 20;

/// Remembers one backward and predicts the next.
#[derive(Debug, Default)]
pub struct Order {
    /// Layers in the order in which the last complete backward asked for them.
    previous: Vec<LayerId>,
    /// The same, of the backward under way.
    current: Vec<LayerId>,
}

impl Order {
    /// A backward asks for this layer's group now.
    pub fn record(&mut self, layer: LayerId) {
        if self.current.len() >= MOST {
            // Nobody says where a backward ends: there is nothing to learn.
            self.current.clear();
        }
        self.current.push(layer);
    }

    /// The backward is complete: what it did is the prediction for the next one.
    pub fn finish(&mut self) {
        if !self.current.is_empty() {
            self.previous = std::mem::take(&mut self.current);
        }
    }

    /// The backward was abandoned: it says nothing about the next one.
    pub fn abandon(&mut self) {
        self.current.clear();
    }

    /// The layers expected after the last recorded one, nearest first. Empty when nothing was
    /// learnt or the backward under way has left the learnt path.
    pub fn expected(&self) -> &[LayerId] {
        if self.previous.starts_with(&self.current) {
            &self.previous[self.current.len()..]
        } else {
            &[]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(ids: &[u32]) -> Vec<LayerId> {
        ids.iter().map(|&id| LayerId(id)).collect()
    }

    /// M11: the order of the first backward serves from the second on.
    #[test]
    fn m11_the_first_backward_predicts_the_second() {
        let mut order = Order::default();
        assert_eq!(order.expected(), []);
        for layer in layers(&[2, 0, 1]) {
            order.record(layer);
        }
        assert_eq!(order.expected(), []);
        order.finish();
        assert_eq!(order.expected(), layers(&[2, 0, 1]));
        order.record(LayerId(2));
        assert_eq!(order.expected(), layers(&[0, 1]));
    }

    /// M11: a step that deviates is not predicted any further, and is learnt in turn.
    #[test]
    fn m11_a_deviation_ends_the_prediction() {
        let mut order = Order::default();
        for layer in layers(&[2, 1, 0]) {
            order.record(layer);
        }
        order.finish();
        for layer in layers(&[2, 0]) {
            order.record(layer);
        }
        assert_eq!(order.expected(), []);
        order.abandon();
        assert_eq!(order.expected(), layers(&[2, 1, 0]));
    }
}
