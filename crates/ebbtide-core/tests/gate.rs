//! The gates, whatever the speeds: an adversary chooses which copy ends next and whether compute or
//! a load goes first.

use ebbtide_core::gate::{Gate, Load, set_triggers};
use proptest::prelude::*;

/// A storage made by operation `made`, read last in forward by `last`, used again from `first` on.
#[derive(Clone, Debug)]
struct Swapped {
    made: usize,
    last: usize,
    first: usize,
    bytes: u64,
    channel: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    NotMade,
    There,
    Leaving,
    Away,
    Coming,
    Back,
}

#[derive(Debug)]
struct World {
    turn: usize,
    base: Vec<u64>,
    storages: Vec<Swapped>,
    places: Vec<Place>,
    loads: Vec<Load>,
    gate: Gate,
    running: bool,
    next: usize,
}

fn minimal(base: &[u64], storages: &[Swapped]) -> Vec<u64> {
    let resident = |at: usize, s: &Swapped| (s.made..=s.last).contains(&at) || at == s.first;
    let bytes =
        |at: usize| storages.iter().filter(|s| resident(at, s)).map(|s| s.bytes).sum::<u64>();
    base.iter().enumerate().map(|(at, base)| base + bytes(at)).collect()
}

impl World {
    fn new(turn: usize, base: Vec<u64>, mut storages: Vec<Swapped>, slack: u64) -> Self {
        storages.sort_by_key(|storage| storage.first);
        let minimal = minimal(&base, &storages);
        let budget = minimal.iter().max().unwrap() + slack;
        let mut loads: Vec<Load> = storages
            .iter()
            .map(|storage| Load {
                bytes: storage.bytes,
                earliest: turn.max(storage.last + 1),
                first_use: storage.first,
                channel: storage.channel,
                trigger: 0,
            })
            .collect();
        set_triggers(&minimal, budget, &mut loads, &mut Vec::new());
        let places = vec![Place::NotMade; storages.len()];
        let gate = Gate::new(minimal, budget);
        Self { turn, base, storages, places, loads, gate, running: false, next: 0 }
    }

    /// What is on the device, counted by places.
    fn bytes(&self) -> u64 {
        let on = |place: &Place| !matches!(place, Place::NotMade | Place::Away);
        let there = self.storages.iter().zip(&self.places).filter(|(_, place)| on(place));
        let workspace = if self.running { self.base[self.next] } else { 0 };
        workspace + there.map(|(storage, _)| storage.bytes).sum::<u64>()
    }

    /// What could happen next.
    fn moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        for (at, place) in self.places.iter().enumerate() {
            if matches!(place, Place::Leaving | Place::Coming) {
                moves.push(Move::Complete(at));
            }
        }
        for channel in 0..3 {
            let mut mine = (0..self.loads.len()).filter(|&at| self.loads[at].channel == channel);
            let open = |&at: &usize| !matches!(self.places[at], Place::Coming | Place::Back);
            let head = mine.find(|at| open(at));
            let fits =
                |&at: &usize| self.places[at] == Place::Away && self.gate.may_load(&self.loads[at]);
            moves.extend(head.filter(fits).map(Move::Load));
        }
        if self.running {
            moves.push(Move::End);
        } else if self.next < self.base.len() && self.gate.may_start() {
            let uses = |at: &usize| self.storages[*at].first <= self.next;
            let all = (0..self.places.len()).filter(uses).all(|at| self.places[at] == Place::Back);
            moves.extend(all.then_some(Move::Start));
        }
        moves
    }

    fn play(&mut self, what: Move) {
        match what {
            Move::Complete(at) if self.places[at] == Place::Leaving => {
                self.places[at] = Place::Away;
                self.gate.offload_done(self.storages[at].bytes);
            }
            Move::Complete(at) => self.places[at] = Place::Back,
            Move::Load(at) => {
                self.places[at] = Place::Coming;
                self.gate.load_started(&self.loads[at]);
            }
            Move::Start => {
                self.running = true;
                for (storage, place) in self.storages.iter().zip(&mut self.places) {
                    if storage.made == self.next {
                        *place = Place::There;
                    }
                }
            }
            Move::End => self.end(),
        }
    }

    fn end(&mut self) {
        self.running = false;
        for (storage, place) in self.storages.iter().zip(&mut self.places) {
            if storage.last == self.next {
                *place = Place::Leaving;
                self.gate.offload_pending(storage.bytes);
            }
            if storage.first == self.next {
                // Used for the last time, too: it is gone.
                *place = Place::Back;
            }
        }
        self.next += 1;
        if self.next < self.base.len() {
            self.gate.reach(self.next);
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Move {
    Complete(usize),
    Load(usize),
    Start,
    End,
}

fn world() -> impl Strategy<Value = World> {
    (1..8usize).prop_flat_map(|turn| {
        let base = prop::collection::vec(0..20u64, 2 * turn);
        let storage = (0..turn, 0..turn, 0..turn, 1..50u64, 0..3usize).prop_map(
            move |(a, b, back, bytes, channel)| Swapped {
                made: a.min(b),
                last: a.max(b),
                first: turn + back,
                bytes,
                channel,
            },
        );
        (base, prop::collection::vec(storage, 0..12), 0..60u64)
            .prop_map(move |(base, storages, slack)| World::new(turn - 1, base, storages, slack))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Whichever copy ends first, however long the others take: never over the budget, and as long
    /// as the step is not over something can go on.
    #[test]
    fn m12_any_order_keeps_to_the_budget_and_ends(
        mut world in world(),
        order in prop::collection::vec(any::<prop::sample::Index>(), 200),
    ) {
        world.gate.reach(0);
        let mut order = order.iter().cycle();
        let mut used = vec![false; world.storages.len()];
        while world.next < world.base.len() {
            let moves = world.moves();
            prop_assert!(!moves.is_empty(), "nothing can go on: {world:?}");
            let what = moves[order.next().unwrap().index(moves.len())];
            let ended = world.next;
            world.play(what);
            if matches!(what, Move::End) {
                for (at, storage) in world.storages.iter().enumerate() {
                    used[at] |= storage.first == ended;
                }
            }
            let gone: u64 =
                world.storages.iter().zip(&used).filter(|(_, used)| **used).map(|(s, _)| s.bytes).sum();
            prop_assert!(world.bytes() - gone <= world.gate.budget());
        }
        prop_assert!(world.turn < world.base.len());
    }

    /// A trigger is never behind the first use, nor before the load may start at all.
    #[test]
    fn m12_triggers_lie_between_their_bounds(world in world()) {
        let mut last = [0; 3];
        for load in &world.loads {
            prop_assert!(load.trigger <= load.first_use);
            prop_assert!(load.trigger >= load.earliest.min(load.first_use));
            prop_assert!(load.trigger >= last[load.channel]);
            last[load.channel] = load.trigger;
        }
    }
}
