// The shared worker that holds the stream for all tabs.
import { Hub, browser, type ToHub } from './hub'

const hub = new Hub(browser)
const scope = self as unknown as { onconnect: (event: MessageEvent) => void }
scope.onconnect = event => {
  const port = event.ports[0]!
  port.onmessage = (message: MessageEvent<ToHub>) => hub.receive(port, message.data)
  port.start()
}
