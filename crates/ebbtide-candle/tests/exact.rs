//! Losses and gradients are those of plain Candle, bit for bit.

mod common;

use candle_core::{DType, Tensor};
use common::{Model, assert_same, bits, file_tier, swap};
use ebbtide_candle::{Policies, Policy, Swap, Tier};

/// T16: every float type, every policy, both tiers, several steps.
#[test]
fn t16_every_policy_and_dtype_gives_the_bits_of_plain() {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let model = Model::new(4, dtype);
        for policy in ["keep", "swap", "recompute", "0:swap,1:recompute,3:swap", "0-3:swap"] {
            for tier in [file_tier(), Tier::Host] {
                let policies = Policies::parse(policy, 4).unwrap();
                let swap = Swap::builder(policies).tier(tier).build().unwrap();
                for step in 0..3 {
                    let ids = model.ids(3, 6, step);
                    let (plain_loss, plain) = model.plain(&ids);
                    let (loss, gradients) = model.swapped(&swap, &ids).unwrap();
                    assert_eq!(bits(&plain_loss), bits(&loss), "{dtype:?} {policy}");
                    assert_same(&model.vars(), &plain, &gradients);
                }
                assert_eq!((swap.active_groups(), swap.bytes_held()), (0, 0));
                assert_eq!(swap.notices(), Vec::<String>::new(), "{dtype:?} {policy}");
                let report = swap.report();
                assert!(report.dropped_bytes > 0, "{dtype:?} {policy}");
                assert_eq!(report.moved_out_bytes, report.moved_in_bytes);
                assert_eq!(report.moved_out_bytes > 0, policy.contains("swap"));
                assert_eq!(report.recompute_ms > 0.0, policy.contains("recompute"));
                // A swapped last layer is wanted back at once: nothing could have been prefetched.
                let missed = if policy.contains("3:swap") { 3 } else { 0 };
                assert_eq!(report.missed_prefetches, missed, "{policy}");
            }
        }
    }
}

/// M12: the prefetch depth changes what is missed, never a bit.
#[test]
fn m12_prefetch_depth_is_a_hint() {
    let model = Model::new(5, DType::F32);
    let ids = model.ids(2, 5, 0);
    let (_, plain) = model.plain(&ids);
    for (depth, missed) in [(0, 4), (1, 0), (3, 0), (100, 0)] {
        let policies = Policies::parse("swap", 5).unwrap();
        let swap = Swap::builder(policies).tier(file_tier()).prefetch(depth).build().unwrap();
        let (_, gradients) = model.swapped(&swap, &ids).unwrap();
        assert_same(&model.vars(), &plain, &gradients);
        assert_eq!(swap.report().missed_prefetches, missed, "depth {depth}");
    }
}

/// C23: batch and sequence length change from step to step.
#[test]
fn c23_changing_sizes() {
    let model = Model::new(3, DType::F32);
    let swap = swap("swap", 3);
    for (batch, seq) in [(2, 5), (3, 9), (1, 4), (4, 2), (2, 5), (2, 1), (1, 1)] {
        let ids = model.ids(batch, seq, 1);
        let (_, plain) = model.plain(&ids);
        let (_, gradients) = model.swapped(&swap, &ids).unwrap();
        assert_same(&model.vars(), &plain, &gradients);
    }
}

/// Policies may change from one step to the next.
#[test]
fn policies_change_between_steps() {
    let model = Model::new(3, DType::F32);
    let swap = swap("keep", 3);
    let ids = model.ids(2, 5, 0);
    let (_, plain) = model.plain(&ids);
    for policy in [Policy::Swap, Policy::Recompute, Policy::Keep, Policy::Swap] {
        swap.set_policies(Policies::uniform(policy, 3)).unwrap();
        let (_, gradients) = model.swapped(&swap, &ids).unwrap();
        assert_same(&model.vars(), &plain, &gradients);
    }
    assert!(swap.set_policies(Policies::uniform(Policy::Keep, 4)).unwrap_err().is_setting());
}

/// Gradients of what tracks nothing are not kept: the store holds the variables' and no other.
#[test]
fn gradients_of_untracked_operands_are_dropped() {
    let model = Model::new(2, DType::F32);
    let ids = model.ids(2, 5, 0);
    let (_, gradients) = model.swapped(&swap("keep", 2), &ids).unwrap();
    let vars: Vec<_> = model.vars().iter().map(|(_, v)| v.id()).collect();
    assert!(gradients.get_ids().all(|id| vars.contains(id)));
    assert_eq!(gradients.get_ids().count(), vars.len());
}

/// A loss that is not a scalar, and a layer that is the loss itself.
#[test]
fn the_loss_may_be_any_tensor() {
    let model = Model::new(2, DType::F32);
    let block = &model.blocks[0];
    let x = model.embed(&model.ids(2, 4, 0)).unwrap();
    let plain = block.forward(&x).unwrap().backward().unwrap();
    let swap = swap("swap", 1);
    let mut step = swap.step();
    let loss = step.layer("only", &block.params, &x, |x| block.forward(x)).unwrap();
    let gradients = step.backward(&loss).unwrap();
    assert_same(&model.vars(), &plain, &gradients);
    let _: Tensor = loss;
}
