//! Steps under plans: the same bits as plain Candle, and never over the budget.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::DType::F32;
use candle_core::{Tensor, Var};
use common::{Model, assert_same, bits, file_tier};
use ebbtide_candle::Outcome::{Departed, Planned, Traced};
use ebbtide_candle::{Auto, Heap, Memory, Outcome, Policies, Policy, Swap};
use ebbtide_core::{LayerPlan, Plan};
use ebbtide_plan::trace::{LinkRecord, TierRecord};
use ebbtide_plan::{predict, range};
use ebbtide_sim::predict::need;

#[global_allocator]
static HEAP: Heap = Heap::new();

/// The heap is the whole process's: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

const LAYERS: usize = 5;

fn engine() -> Swap {
    let policies = Policies::uniform(Policy::Swap, LAYERS);
    Swap::builder(policies).tier(file_tier()).build().unwrap()
}

fn tier() -> TierRecord {
    let link = LinkRecord { bytes_per_s: 1 << 30, bytes_per_s_busy: 0, latency_ns: 100_000 };
    TierRecord {
        name: "file".into(),
        capacity_bytes: 0,
        out: link,
        back: link,
        compute_slowdown_permille: 1000,
        shared_duplex: false,
    }
}

/// Two traced steps.
fn traced(swap: &Swap, model: &Model, ids: &Tensor) {
    swap.start_tracing(&HEAP);
    for _ in 0..2 {
        drop(model.swapped(swap, ids).unwrap());
    }
    swap.end_step(Duration::from_millis(50));
}

/// Numbers that look random, the same on every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % below as u64).unwrap()
    }
}

fn random_plan(numbers: &mut Numbers, model: &ebbtide_plan::Model) -> Plan {
    let mut plan = Plan::default();
    for layer in &model.layers {
        let recompute = numbers.next(3) == 0;
        let all = 0..layer.storages.len();
        let swap = all.filter(|_| !recompute && numbers.next(2) == 0).collect();
        plan.layers.push(LayerPlan { recompute, swap, ..LayerPlan::default() });
    }
    plan
}

/// Any plan, at the least that it needs and at more, gives the gradients of plain Candle, and the
/// allocator never sees more than the budget.
#[test]
fn random_plans_are_exact_and_inside_their_budget() {
    let _turn = turn();
    let model = Model::new(LAYERS, F32);
    let ids = model.ids(16, 64, 0);
    let (plain_loss, plain) = model.plain(&ids);
    let swap = engine();
    traced(&swap, &model, &ids);
    let known = swap.trace(tier()).unwrap().model();
    let mut numbers = Numbers(7);
    for round in 0..12u64 {
        let decided = random_plan(&mut numbers, &known);
        let least = need(&known, &decided).unwrap();
        let budget = least.bytes + (round % 4) * 200_000;
        let predicted = predict(&known, &decided, budget).unwrap();
        swap.follow(predicted.schedule).unwrap();
        HEAP.reset_peak();
        let (loss, gradients) = model.swapped(&swap, &ids).unwrap();
        let peak = HEAP.peak_bytes();
        assert!(peak <= budget, "round {round}: {peak} of {budget} at {:?}", least.op);
        assert_eq!(bits(&loss), bits(&plain_loss), "round {round}");
        assert_same(&model.vars(), &gradients, &plain);
        assert!(!swap.has_departed() && swap.active_groups() == 0 && swap.bytes_held() == 0);
    }
}

/// The planner's own plans: from the first step on, at budgets from the least to all.
#[test]
fn budgets_hold_from_the_first_step_on() {
    let _turn = turn();
    let model = Model::new(LAYERS, F32);
    let ids = model.ids(16, 64, 0);
    let (_, plain) = model.plain(&ids);
    let swap = engine();
    traced(&swap, &model, &ids);
    let known = range(&swap.trace(tier()).unwrap().model());
    for part in [0.02, 0.2, 0.5, 1.0] {
        let budget = known.at(part);
        let swap = engine();
        let mut auto = Auto::start(&swap, &HEAP, "file", Memory::Bytes(budget));
        for step in 0..5 {
            HEAP.reset_peak();
            let (_, gradients) = model.swapped(&swap, &ids).unwrap();
            let peak = HEAP.peak_bytes();
            assert!(peak <= budget, "step {step}: {peak} of {budget}");
            assert_same(&model.vars(), &gradients, &plain);
            drop(gradients);
            let outcome = auto.after_step(&swap, Duration::from_millis(50)).unwrap();
            assert_eq!(outcome == Traced, step == 0);
        }
    }
}

/// What can't be met is said after the first step, with what could be.
/// N % means N % of this.
#[test]
fn the_peak_of_plain_training_is_foreseen() {
    let _turn = turn();
    let model = Model::new(LAYERS, F32);
    let ids = model.ids(16, 64, 0);
    let swap = engine();
    traced(&swap, &model, &ids);
    let foreseen = range(&swap.trace(tier()).unwrap().model()).plain;
    drop(swap);
    HEAP.reset_peak();
    drop(model.plain(&ids));
    let ratio = foreseen as f64 / HEAP.peak_bytes() as f64;
    assert!((0.97..1.03).contains(&ratio), "{ratio}");
}

#[test]
fn a_budget_that_is_too_small_is_an_error_that_names_the_least() {
    let _turn = turn();
    let model = Model::new(LAYERS, F32);
    let ids = model.ids(4, 16, 0);
    let swap = engine();
    let mut auto = Auto::start(&swap, &HEAP, "file", Memory::Bytes(1000));
    drop(model.swapped(&swap, &ids).unwrap());
    let error = auto.after_step(&swap, Duration::from_millis(5)).unwrap_err();
    let text = error.to_string();
    assert!(error.is_no_plan() && error.is_setting(), "{text}");
    assert!(text.starts_with("no plan fits 1000 B: the least found is "), "{text}");
    assert!(error.hint().unwrap().starts_with("give at least "), "{error:?}");
}

/// C23: another batch is no error: what it saves moves at once, and then there is a new plan.
#[test]
fn c23_other_shapes_are_traced_again() {
    let _turn = turn();
    let model = Model::new(LAYERS, F32);
    let swap = engine();
    let mut auto = Auto::start(&swap, &HEAP, "file", Memory::Percent(60.0));
    let mut outcomes = Vec::new();
    for batch in [8, 8, 8, 12, 12, 12, 12] {
        let ids = model.ids(batch, 64, 0);
        let (_, plain) = model.plain(&ids);
        let (_, gradients) = model.swapped(&swap, &ids).unwrap();
        assert_same(&model.vars(), &gradients, &plain);
        outcomes.push(auto.after_step(&swap, Duration::from_millis(20)).unwrap());
    }
    let known = |outcome: &Outcome| !matches!(outcome, Outcome::AsPlanned | Outcome::Replanned);
    let turns: Vec<Outcome> = outcomes.iter().copied().filter(known).collect();
    assert_eq!(turns, [Traced, Planned, Departed, Traced, Planned], "{outcomes:?}");
}

/// A layer that draws random numbers is never recomputed, and the trace says why.
#[test]
fn a_layer_with_random_numbers_is_not_recomputed() {
    let _turn = turn();
    let w = Var::randn(0f32, 0.1, (64, 64), &candle_core::Device::Cpu).unwrap();
    let x = Tensor::randn(0f32, 1.0, (64, 64), &candle_core::Device::Cpu).unwrap();
    let swap = Swap::builder(Policies::uniform(Policy::Swap, 2)).tier(file_tier()).build().unwrap();
    swap.start_tracing(&HEAP);
    let mut step = swap.step();
    let params = [("w".to_string(), w.clone())];
    let h = step.layer("sure", &params, &x, |x| x.matmul(&w)?.gelu()).unwrap();
    let h = step.layer("drawn", &params, &h, |h| h.matmul(&w)? * h.rand_like(0.0, 1.0)?).unwrap();
    step.backward(&h.sqr().unwrap().mean_all().unwrap()).unwrap();
    let model = swap.trace(tier()).unwrap().model();
    assert_eq!(model.layers[0].not_recomputable, None);
    assert!(model.layers[1].not_recomputable.as_ref().unwrap().contains("random numbers"));
}
