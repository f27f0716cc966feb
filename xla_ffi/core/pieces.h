// The layout on the wire, as Python's collectives plan it: runs of leaves that fill rows.
//
// A bucket has groups of rows of one width; a piece is a run of one leaf that starts at the
// first entry of a row. Rows that no piece fills are padding: zero bits, scale 0.
#pragma once

#include <cstdint>

namespace sfpo {

struct Piece {
  int64_t leaf;    // its place among the leaves
  int64_t start;   // first entry within the leaf
  int64_t length;  // entries
  int64_t group;   // the group of rows that it fills
  int64_t row;     // its first row there
};

inline constexpr int64_t kPieceFields = 5;

}  // namespace sfpo
