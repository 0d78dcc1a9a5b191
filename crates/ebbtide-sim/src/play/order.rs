//! The order of what happens in a step: how the forwards and backwards of several passes are mixed.

use std::collections::VecDeque;

use crate::play::draw::{Draw, HALF};
use crate::play::features::Feature;
use crate::play::plan::Event;
use crate::random::Ratio;

/// The events of a step. `forwards` and `backwards` are the visits of each pass in their orders.
pub(super) fn events(
    draw: &mut Draw<'_>,
    forwards: &[Vec<usize>],
    backwards: &[Vec<usize>],
) -> Vec<Event> {
    let whole = |visits: &Vec<usize>, event: fn(usize) -> Event| -> Vec<Event> {
        visits.iter().map(|&visit| event(visit)).collect()
    };
    let forwards: Vec<Vec<Event>> = forwards.iter().map(|f| whole(f, Event::Forward)).collect();
    let mut backwards: Vec<Vec<Event>> =
        backwards.iter().map(|b| whole(b, Event::Backward)).collect();
    if draw.random.chance(HALF) {
        for backward in &mut backwards {
            backward.push(Event::Finish);
        }
    }
    let mut events = match draw.random.below(4) {
        _ if draw.mix.has(Feature::Interleaved) && draw.random.chance(HALF) => {
            merged(draw, forwards, backwards)
        }
        0 => forwards.into_iter().zip(backwards).flat_map(|(f, b)| [f, b]).flatten().collect(),
        1 => forwards.into_iter().chain(backwards).flatten().collect(),
        2 => {
            backwards.reverse();
            forwards.into_iter().chain(backwards).flatten().collect()
        }
        _ => one_forward_one_backward(draw, forwards, backwards),
    };
    events.push(Event::Finish);
    interrupt(draw, &mut events);
    events
}

fn one_forward_one_backward(
    draw: &mut Draw<'_>,
    forwards: Vec<Vec<Event>>,
    backwards: Vec<Vec<Event>>,
) -> Vec<Event> {
    let ahead = 1 + draw.index(forwards.len());
    let mut events = Vec::new();
    let (mut forwards, mut backwards) = (forwards.into_iter(), backwards.into_iter());
    events.extend(forwards.by_ref().take(ahead).flatten());
    for forward in forwards {
        events.extend(backwards.next().into_iter().flatten());
        events.extend(forward);
    }
    events.extend(backwards.flatten());
    events
}

/// Each pass in its own order, all mixed.
fn merged(
    draw: &mut Draw<'_>,
    forwards: Vec<Vec<Event>>,
    backwards: Vec<Vec<Event>>,
) -> Vec<Event> {
    let mut passes: Vec<VecDeque<Event>> = forwards
        .into_iter()
        .zip(backwards)
        .map(|(f, b)| f.into_iter().chain(b).collect())
        .collect();
    let mut events = Vec::new();
    while passes.iter().any(|pass| !pass.is_empty()) {
        let pass = draw.index(passes.len());
        events.extend(passes[pass].pop_front());
    }
    events
}

fn interrupt(draw: &mut Draw<'_>, events: &mut Vec<Event>) {
    for at in (0..events.len()).rev() {
        if draw.roll(Feature::Evaluation) && draw.random.chance(Ratio(1, 3)) {
            let bytes = 8 * draw.random.below(1024);
            events.insert(at, Event::Evaluate(bytes));
        }
    }
    if draw.roll(Feature::Abort) {
        let at = draw.index(events.len());
        let drop_engine = draw.roll(Feature::DropEngine);
        events.truncate(at);
        events.push(Event::Abort(drop_engine));
    }
}
