// The order of MegaMoE's tiles where one warp of a CTA walks it and the other warps replay what that warp wrote down.
//
// A unit is up to kUnitRows consecutive rows of one expert; its tiles of one phase are a chunk. All instances deal one sequence
// of chunks among them, tile by tile,
//     L1(U0) .. L1(U_lag)  L2(U0)  L1(U_lag+1)  L2(U1)  ..
// up to the last Linear-1 chunk. The Linear-2 chunks behind it are the tail; its tiles go by ticket to whoever asks.
//
// Whatever a tile waits for stands before it in the sequence, so the first unfinished tile can always run: Linear-2 of a row
// waits for Linear-1 of it; where rows lie in a ring, Linear-1 of a row waits for Linear-2 of the row that had its place, which
// is dealt by then in a ring of lag + 1 units. The tail waits for Linear-1 alone.

#pragma once

#include <cstdint>

#include <deep_gemm/xstage/moe_schedule.hpp>

namespace xstage {

// The lag, in units, for a lead of at least one row, where no more than `most_units` (at least one) may be under way: what
// Linear-1 has begun and Linear-2 has not. A lead beyond that is cut; one that ends inside a unit is rounded up to all of it.
XSTAGE_HOST_DEVICE constexpr uint32_t lag_of_lead(uint32_t lead_rows, uint32_t unit_rows, uint32_t most_units) {
    const uint32_t num_units = (lead_rows - 1) / unit_rows + 1;
    return (num_units < most_units ? num_units : most_units) - 1;
}

// A tile, and whether the other CTA of a pair takes the next row of the same weights at the same time. Both of a pair get the
// same answer.
struct UnitTile {
    Tile tile;
    bool is_paired;
};

// One unit; past the last one, `expert_idx` is the number of experts. `Rows` is as in TileCursor.
template <uint32_t kNumExperts, uint32_t kUnitRows>
struct UnitCursor {
    uint32_t expert_idx = 0;
    uint32_t row_offset = 0;  // rows of the experts before it
    uint32_t first_row = 0;   // within the expert
    uint32_t num_rows = 0;    // of the expert

    template <typename Rows>
    XSTAGE_HOST_DEVICE void start(const Rows& rows) {
        *this = {0, 0, 0, rows(0)};
        skip_done_experts(rows);
    }

    template <typename Rows>
    XSTAGE_HOST_DEVICE void advance(const Rows& rows) {
        first_row += height();
        skip_done_experts(rows);
    }

    XSTAGE_HOST_DEVICE bool is_done() const { return expert_idx == kNumExperts; }

    XSTAGE_HOST_DEVICE uint32_t height() const {
        const uint32_t num_left = num_rows - first_row;
        return num_left < kUnitRows ? num_left : kUnitRows;
    }

private:
    template <typename Rows>
    XSTAGE_HOST_DEVICE void skip_done_experts(const Rows& rows) {
        while (not is_done() and first_row == num_rows) {
            row_offset += num_rows;
            first_row = 0;
            ++ expert_idx;
            num_rows = is_done() ? 0 : rows(expert_idx);
        }
    }
};

// The tiles of one instance. kRowsInner: neighbours in a chunk share the tile within the row, else they share the row. With
// even tiles a row, chunks begin at even instances, so that instances 2j and 2j + 1 are always neighbours.
template <uint32_t kNumL1Tiles, uint32_t kNumL2Tiles, uint32_t kNumExperts, uint32_t kUnitRows, bool kRowsInner>
struct MoeUnitSchedule {
    static_assert(kNumL1Tiles % 2 == 0 and kNumL2Tiles % 2 == 0, "pairs of instances stay inside a chunk");
    using Cursor = UnitCursor<kNumExperts, kUnitRows>;

    Cursor l1, l2;
    uint32_t lag = 0;
    uint32_t num_units_ahead = 0;  // of Linear-1
    uint32_t tile_idx = 0;         // from the first tile of the chunk at hand; may lie beyond it
    uint32_t tail_offset = 0;      // tiles of the tail before the unit of l2

    template <typename Rows>
    XSTAGE_HOST_DEVICE void start(const Rows& rows, uint32_t instance_idx, uint32_t lag_units) {
        l1.start(rows);
        l2 = l1;
        lag = lag_units;
        num_units_ahead = 0;
        tile_idx = instance_idx;
        tail_offset = 0;
    }

    // Phase::None: the tail begins, for every instance behind the same chunk.
    template <typename Rows>
    XSTAGE_HOST_DEVICE UnitTile next(const Rows& rows, uint32_t num_instances) {
        while (not l1.is_done()) {
            const bool is_l1 = num_units_ahead <= lag;
            const Cursor& unit = is_l1 ? l1 : l2;
            const uint32_t num_tiles = unit.height() * (is_l1 ? kNumL1Tiles : kNumL2Tiles);
            if (tile_idx < num_tiles) {
                const uint32_t place = tile_idx;
                tile_idx += num_instances;
                return is_l1 ? at<kNumL1Tiles>(Phase::Linear1, l1, place) : at<kNumL2Tiles>(Phase::Linear2, l2, place);
            }
            tile_idx -= num_tiles;
            if (is_l1) {
                l1.advance(rows);
                ++ num_units_ahead;
            } else {
                l2.advance(rows);
                -- num_units_ahead;
            }
        }
        return none();
    }

    // The tile at `position` of the tail, Phase::None behind its end. Ask for ascending positions.
    template <typename Rows>
    XSTAGE_HOST_DEVICE UnitTile next_of_tail(const Rows& rows, uint32_t position) {
        while (not l2.is_done()) {
            const uint32_t num_tiles = l2.height() * kNumL2Tiles;
            if (position < tail_offset + num_tiles) return at<kNumL2Tiles>(Phase::Linear2, l2, position - tail_offset);
            tail_offset += num_tiles;
            l2.advance(rows);
        }
        return none();
    }

private:
    template <uint32_t kNumTiles>
    XSTAGE_HOST_DEVICE static UnitTile at(Phase phase, const Cursor& unit, uint32_t place) {
        const uint32_t height = unit.height();
        const uint32_t row = kRowsInner ? place % height : place / kNumTiles;
        const uint32_t n_block_idx = kRowsInner ? place / height : place % kNumTiles;
        // The first of a pair has a partner if a row follows in the unit, the second if one precedes.
        const bool is_paired = kRowsInner and (place % 2 == 0 ? row + 1 < height : row > 0);
        return {{phase, unit.expert_idx, unit.row_offset, unit.first_row + row, n_block_idx}, is_paired};
    }

    XSTAGE_HOST_DEVICE static UnitTile none() { return {{Phase::None, 0, 0, 0, 0}, false}; }
};

}  // namespace xstage
