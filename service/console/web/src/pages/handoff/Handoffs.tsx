// Every handoff of every job, newest first.
import { HandoffList } from './HandoffList'

export default function Handoffs() {
  return <><h1 className="hidden-text">Handoffs</h1><HandoffList /></>
}
