//! Bytes on the Rust heap, counted by the allocator and not by the engine.

mod common;

use candle_core::DType::F32;
use common::{Model, swap};
use ebbtide_candle::Heap;

#[global_allocator]
static HEAP: Heap = Heap::new();

/// C9: memory is flat over a hundred steps, every seventh given up half-way. One test only in this
/// file: the heap is the whole process's.
#[test]
fn c9_memory_is_flat_and_lower() {
    let model = Model::new(6, F32);
    let ids = model.ids(16, 64, 0);
    let peak = |run: &dyn Fn()| {
        let base = HEAP.live_bytes();
        HEAP.reset_peak();
        run();
        HEAP.peak_bytes() - base
    };
    let plain = peak(&|| drop(model.plain(&ids)));
    let swap = swap("swap", 6);
    model.swapped(&swap, &ids).unwrap();
    let swapped = peak(&|| drop(model.swapped(&swap, &ids).unwrap()));
    assert!(swapped * 2 < plain, "{swapped} of {plain}");

    let before = HEAP.live_bytes();
    for round in 0..100 {
        if round % 7 == 6 {
            let mut step = swap.step();
            let (x, block) = (model.embed(&ids).unwrap(), &model.blocks[0]);
            step.layer("h.0", &block.params, &x, |x| block.forward(x)).unwrap();
        } else {
            model.swapped(&swap, &ids).unwrap();
        }
    }
    let grown = HEAP.live_bytes().saturating_sub(before);
    assert!(grown < 100_000, "{grown} bytes more after 100 steps");
}
